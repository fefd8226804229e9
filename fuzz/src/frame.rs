//! A frame as it comes from a connection, with its payload of batches.

use ringmain_wire::FrameView;
use ringmain_wire::frame::{FRAME_PREFIX_BYTES, frame_bytes};
use ringmain_wire::message::{Request, Response};
use ringmain_wire::produce::produced_batches;

use super::{batch, message};

/// Any bytes as a frame, as a server and as a client see it.
pub fn run(data: &[u8]) {
    if let Some(prefix) = data.first_chunk::<FRAME_PREFIX_BYTES>() {
        let _ = frame_bytes(*prefix);
    }
    if let Ok(frame) = FrameView::parse(data) {
        assert!(FrameView::parse_response(data).is_ok(), "what a server takes a client takes");
        assert!(frame.payload.len() < data.len());
        if let Ok(request) = Request::decode(&frame.message) {
            message::reencode(&request, frame.correlation_id());
        }
        let mut seen = 0;
        for produced in produced_batches(frame.payload) {
            let Ok((header, bytes)) = produced else { break };
            assert_eq!(header.batch_bytes as usize, bytes.len());
            seen += bytes.len();
            batch::read(&header, bytes);
        }
        assert!(seen <= frame.payload.len());
    }
    if let Ok(frame) = FrameView::parse_response(data) {
        let _ = Response::decode(&frame.message);
    }
}
