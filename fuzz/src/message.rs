//! A message without its frame: the frame's sizes are put around it, so that every mutation reaches the verifier.

use ringmain_wire::FrameView;
use ringmain_wire::message::{Request, Response};

/// Any bytes as the flatbuffer of a message.
pub fn run(data: &[u8]) {
    let mut frame = vec![0; 4];
    frame.extend((data.len() as u32).to_le_bytes());
    frame.extend(data);
    frame.resize(frame.len().next_multiple_of(8), 0);
    let behind = frame.len() as u32 - 4;
    frame[..4].copy_from_slice(&behind.to_le_bytes());
    if let Ok(view) = FrameView::parse(&frame)
        && let Ok(request) = Request::decode(&view.message)
    {
        reencode(&request, view.correlation_id());
    }
    if let Ok(view) = FrameView::parse_response(&frame) {
        let _ = Response::decode(&view.message);
    }
}

/// What was decoded must come back when it is encoded and decoded again.
pub fn reencode(request: &Request, correlation_id: u64) {
    let frame = request.to_frame(correlation_id);
    let view = FrameView::parse(&frame).expect("a frame that was just encoded");
    assert_eq!(view.correlation_id(), correlation_id);
    assert_eq!(Request::decode(&view.message).as_ref(), Ok(request));
}
