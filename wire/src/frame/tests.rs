use proptest::prelude::*;

use super::*;
use crate::error_code::ErrorCode;
use crate::hello::HelloRequest;
use crate::message::{ErrorResponse, Request, Response, encode_error};

fn error_frame(message: &'static str) -> Vec<u8> {
    let mut out = Vec::new();
    let error = ErrorResponse::new(ErrorCode::SERVER_BUSY, message);
    encode_error(&mut FrameEncoder::new(), 77, &error, &mut out);
    out
}

#[test]
fn a_frame_reads_back_and_is_a_multiple_of_eight() {
    for text in ["", "a", "ab", "abc", "a longer sentence"] {
        let frame = error_frame(text);
        assert!(frame.len().is_multiple_of(8));
        let view = FrameView::parse(&frame).unwrap();
        assert_eq!(view.correlation_id(), 77);
        assert!(view.payload.is_empty());
        let Response::Error(error) = Response::decode(&view.message).unwrap() else { panic!("not an error") };
        assert_eq!((error.code, &*error.message), (ErrorCode::SERVER_BUSY, text));
    }
}

#[test]
fn the_payload_follows_the_head_at_a_multiple_of_eight() {
    let payload = [7; 24];
    let mut frame = vec![];
    let request = Request::Produce(crate::produce::ProduceRequest { durability: None, timeout_ms: 5 });
    request.encode(&mut FrameEncoder::new(), 1, payload.len(), &mut frame);
    assert!(frame.len().is_multiple_of(8));
    frame.extend(payload);
    let view = FrameView::parse(&frame).unwrap();
    assert_eq!(view.payload, payload);
    assert_eq!(Request::decode(&view.message).unwrap(), request);
}

#[test]
fn heads_can_be_appended_behind_each_other_with_one_encoder() {
    let (mut encoder, mut out) = (FrameEncoder::new(), vec![1, 2, 3]);
    for id in 1..4 {
        encode_error(&mut encoder, id, &ErrorResponse::new(ErrorCode::INTERNAL, "x"), &mut out);
    }
    let each = (out.len() - 3) / 3;
    for (id, frame) in (1..).zip(out[3..].chunks(each)) {
        assert_eq!(FrameView::parse(frame).unwrap().correlation_id(), id);
    }
}

#[test]
fn lengths_out_of_bounds_are_refused_before_anything_else() {
    for bytes in [0u32, 4, 7, 11, 13, FRAME_BYTES_MAX as u32 + 4, u32::MAX, u32::MAX - 3] {
        assert!(frame_bytes(bytes.to_le_bytes()).is_err(), "{bytes}");
        let mut frame = error_frame("x");
        frame[..4].copy_from_slice(&bytes.to_le_bytes());
        assert!(FrameView::parse(&frame).is_err());
    }
    assert_eq!(frame_bytes(12u32.to_le_bytes()), Ok(12));
    let frame = error_frame("x");
    for cut in 0..frame.len() {
        assert!(FrameView::parse(&frame[..cut]).is_err());
    }
    assert!(matches!(FrameView::parse(&[&frame[..], &[0; 8]].concat()), Err(FrameError::Length { .. })));
}

#[test]
fn a_message_size_past_the_frame_is_refused() {
    for size in [u32::MAX, u32::MAX - 8, FRAME_BYTES_MAX as u32, 1 << 20, 0] {
        let mut frame = error_frame("x");
        frame[4..8].copy_from_slice(&size.to_le_bytes());
        assert!(FrameView::parse(&frame).is_err(), "{size}");
    }
}

#[test]
fn padding_that_is_not_zero_is_refused() {
    let mut frame = error_frame("");
    let size = u32::from_le_bytes([frame[4], frame[5], frame[6], frame[7]]) as usize;
    let end = MESSAGE_AT + size;
    if end < frame.len() {
        frame[end] = 1;
        assert_eq!(FrameView::parse(&frame).err(), Some(FrameError::Padding));
    }
}

#[test]
fn a_message_kind_of_a_later_version_is_a_decode_error_and_no_frame_error() {
    let frame = encode_frame(9, |builder| {
        let args = schema::DeleteTopicRequestArgs { name: Some(builder.create_string("n")) };
        let body = schema::DeleteTopicRequest::create(builder, &args).as_union_value();
        (schema::Body(200), body)
    });
    let view = FrameView::parse(&frame).unwrap();
    let error = Request::decode(&view.message).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UNSUPPORTED);
    assert_eq!(view.correlation_id(), 9);
}

/// Many offsets that lead to the same table: small on the wire, large when walked.
#[test]
fn a_message_that_expands_when_walked_is_refused() {
    let frame = encode_frame(1, |builder| {
        let text = builder.create_string(&"x".repeat(20_000));
        let texts = vec![text; 20_000];
        let topics = builder.create_vector(&texts);
        let args = schema::MetadataRequestArgs { topics: Some(topics), ..Default::default() };
        (schema::Body::MetadataRequest, schema::MetadataRequest::create(builder, &args).as_union_value())
    });
    let error = FrameView::parse(&frame).unwrap_err();
    assert_eq!(error, FrameError::Message(InvalidFlatbuffer::ApparentSizeTooLarge));
}

#[test]
fn metadata_of_ten_thousand_topics_fits_a_response_and_its_walk_limits() {
    use crate::metadata::{Metadata, PartitionMetadata, TopicMetadata, encode_metadata};
    let topics = (0..10_000).map(|number| TopicMetadata {
        name: format!("topic-{number:05}"),
        topic_id: number.into(),
        partitions: vec![PartitionMetadata { shard: 1, ..PartitionMetadata::default() }],
        ..TopicMetadata::default()
    });
    let metadata = Metadata { version: 1, topics: topics.collect(), ..Metadata::default() };
    let mut frame = Vec::new();
    encode_metadata(&mut FrameEncoder::new(), 1, &metadata, &mut frame);
    let view = FrameView::parse_response(&frame).unwrap();
    assert_eq!(Response::decode(&view.message).unwrap(), Response::Metadata(metadata));
}

fn read_everything(frame: &[u8]) {
    if let Ok(view) = FrameView::parse(frame) {
        // Debug walks each field of the generated reader.
        let _ = format!("{:?}", view.message).len();
        let _ = Request::decode(&view.message);
        let _ = Response::decode(&view.message);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 12..400)) {
        read_everything(&bytes);
        // And with sizes that let the parser get as far as the verifier.
        bytes.truncate(bytes.len() / 8 * 8);
        let size = bytes.len() as u32;
        bytes[..4].copy_from_slice(&(size - 4).to_le_bytes());
        bytes[4..8].copy_from_slice(&(size - 8).to_le_bytes());
        read_everything(&bytes);
    }

    #[test]
    fn mutated_frames_never_panic(
        kind in 0usize..crate::samples::FRAMES,
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut frame = crate::samples::frames().swap_remove(kind).1;
        for (at, value) in flips {
            let at = 8 + at.index(frame.len() - 8);
            frame[at] = value;
        }
        read_everything(&frame);
    }

    #[test]
    fn hellos_round_trip(name in "\\PC{0,60}", data in proptest::collection::vec(any::<u8>(), 0..50), features: u64) {
        let request = Request::Hello(HelloRequest {
            protocol_version: 3,
            features,
            client_name: name,
            auth_mechanism: String::new(),
            auth_data: data,
        });
        let frame = request.to_frame(5);
        prop_assert_eq!(Request::decode(&FrameView::parse(&frame).unwrap().message).unwrap(), request);
    }
}

#[test]
fn each_sample_frame_round_trips() {
    let frames = crate::samples::frames();
    assert_eq!(frames.len(), crate::samples::FRAMES);
    for (name, frame) in frames {
        let view = FrameView::parse(&frame).unwrap();
        let request = Request::decode(&view.message);
        let response = Response::decode(&view.message);
        assert_eq!(request.is_ok(), name.ends_with("request"), "{name}: {request:?}");
        assert_eq!(response.is_ok(), name.ends_with("response"), "{name}: {response:?}");
        crate::samples::check(name, request.ok(), response.ok());
    }
}
