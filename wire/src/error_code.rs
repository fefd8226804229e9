//! Error codes: stable numbers with a name, a sentence, and what a client should do. Where TubeMQ has a code for the same
//! case its number is used; Ringmain's own start at 600. PROTOCOL.md has the same table; a test compares the two.

use std::fmt;

/// A code as it stands in `ErrorResponse`, `ProduceResult`, `FetchedPartition` and others. A newtype and not an enum, so
/// that a client can carry codes that are younger than it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ErrorCode(pub u16);

/// What a client should do about a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAction {
    /// Nothing: it worked.
    Proceed,
    /// Send the same request again, with a back-off that grows.
    Retry,
    /// Fetch new metadata, then send again, maybe elsewhere.
    Refresh,
    /// Wait for `retry_after_ms`, then send again.
    BackOff,
    /// Choose another start: the log start or the log end.
    ResetOffset,
    /// Raise the producer epoch and number what is not acked anew, from sequence 0.
    Renumber,
    /// Change the request or the set-up: the same request fails again.
    Fix,
}

impl ClientAction {
    /// The phrase that PROTOCOL.md uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Proceed => "proceed",
            Self::Retry => "retry",
            Self::Refresh => "refresh metadata, retry",
            Self::BackOff => "back off, retry",
            Self::ResetOffset => "reset the offset",
            Self::Renumber => "renumber",
            Self::Fix => "fix the request",
        }
    }
}

macro_rules! codes {
    ($($number:literal $name:ident $action:ident $sentence:literal)*) => {
        impl ErrorCode {
            $(
                #[doc = $sentence]
                pub const $name: Self = Self($number);
            )*

            /// Every code of this version, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The code's name; `UNKNOWN` for a number of another version.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($number => stringify!($name),)*
                    _ => "UNKNOWN",
                }
            }

            /// What the code means, in one sentence.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self.0 {
                    $($number => $sentence,)*
                    _ => "The server sent a code that this version does not know.",
                }
            }

            /// What a client should do. An unknown number is treated by its hundreds: 5xx is worth a retry, the rest is not.
            #[must_use]
            pub const fn action(self) -> ClientAction {
                match self.0 {
                    $($number => ClientAction::$action,)*
                    500..600 => ClientAction::Retry,
                    _ => ClientAction::Fix,
                }
            }
        }
    };
}

codes! {
    200 OK Proceed "It worked."
    400 BAD_REQUEST Fix "The request is malformed or has a value that is not allowed."
    401 UNAUTHORIZED Fix "The client is not signed in, or may not do this."
    403 NOT_HERE Refresh "The partition is not on this broker, or is closed here."
    404 END_OF_LOG BackOff "There is nothing newer to read yet."
    419 SERVER_BUSY BackOff "The disk or another shard can't keep up; nothing was stored."
    421 TOO_MANY_REQUESTS BackOff "More requests or bytes are in flight than the connection may have."
    431 TOPIC_NOT_FOUND Fix "There is no such topic; create it first."
    444 PARTITION_NOT_FOUND Fix "The topic has no such partition."
    445 TOO_LARGE Fix "A record, batch, message or frame is larger than its limit."
    500 INTERNAL Retry "The server failed in a way that it does not know; its log has the reason."
    503 UNAVAILABLE Retry "The server is starting, stopping or paused."
    600 UNSUPPORTED Fix "The server does not know this message, version, codec or feature."
    601 CORRUPT_BATCH Retry "The batch's CRC does not match its bytes; it was damaged on the way."
    602 INVALID_BATCH Fix "The batch's CRC is right but its structure is not."
    603 OUT_OF_RANGE ResetOffset "The offset is below the log start or past the log end."
    604 STORE_FAILED Refresh "A write or sync of this shard's log failed; it can be read but not written until an operator acts."
    605 DISK_FULL BackOff "The disk is full; produces are refused until space returns."
    606 TIMED_OUT Retry "The durability level was not reached in time; it may still be reached."
    607 TOPIC_EXISTS Fix "A topic of this name exists already."
    608 LIMIT_REACHED Fix "The server has as many topics, partitions or connections as it may have."
    620 OUT_OF_SEQUENCE Renumber "Batches of the producer before this one are missing; it was not stored."
    621 PRODUCER_FENCED Fix "Another instance of the producer has taken over with a higher epoch; the batch was not stored."
    622 SEQUENCE_UNKNOWN Fix "The batch lies behind the producer's last ones and is none of them: whether it is stored is not known."
    623 PRODUCER_UNKNOWN Renumber "The broker has forgotten the producer; the batch was not stored now, an earlier copy may be."
}

impl ErrorCode {
    /// Whether it is `OK`.
    #[must_use]
    pub const fn is_ok(self) -> bool {
        self.0 == Self::OK.0
    }

    /// Whether the same request may succeed later without anybody changing it.
    #[must_use]
    pub const fn retriable(self) -> bool {
        matches!(self.action(), ClientAction::Retry | ClientAction::Refresh | ClientAction::BackOff)
    }

    /// Whether a produce that was answered with it may be stored all the same (PROTOCOL 2.1); of numbers that are not known
    /// here nothing else can be said.
    #[must_use]
    pub fn leaves_fate_open(self) -> bool {
        matches!(
            self,
            Self::INTERNAL | Self::UNAVAILABLE | Self::STORE_FAILED | Self::TIMED_OUT | Self::SEQUENCE_UNKNOWN
        ) || !Self::ALL.contains(&self)
    }

    /// Whether the client should fetch new metadata before it tries again or gives up: its idea of topics and owners may
    /// be old.
    #[must_use]
    pub const fn wants_refresh(self) -> bool {
        matches!(self, Self::NOT_HERE | Self::TOPIC_NOT_FOUND | Self::PARTITION_NOT_FOUND | Self::STORE_FAILED)
    }
}

impl Default for ErrorCode {
    fn default() -> Self {
        Self::OK
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_and_names_are_unique() {
        assert!(ErrorCode::ALL.windows(2).all(|pair| pair[0] < pair[1]));
        let names: std::collections::HashSet<_> = ErrorCode::ALL.iter().map(|code| code.name()).collect();
        assert_eq!(names.len(), ErrorCode::ALL.len());
    }

    #[test]
    fn tubemq_numbers_keep_their_meaning() {
        assert_eq!(ErrorCode(419), ErrorCode::SERVER_BUSY);
        assert_eq!(ErrorCode(431), ErrorCode::TOPIC_NOT_FOUND);
        assert!(ErrorCode::SERVER_BUSY.retriable() && !ErrorCode::TOO_LARGE.retriable());
    }

    #[test]
    fn what_the_protocol_says_of_a_fate_that_is_open_holds() {
        let open = ErrorCode::ALL.iter().filter(|code| code.leaves_fate_open()).map(|code| code.0);
        assert_eq!(open.collect::<Vec<_>>(), [500, 503, 604, 606, 622]);
        assert!(ErrorCode(599).leaves_fate_open() && !ErrorCode::SERVER_BUSY.leaves_fate_open());
    }

    #[test]
    fn unknown_numbers_have_a_name_and_an_action() {
        assert_eq!(ErrorCode(599).to_string(), "599 UNKNOWN");
        assert!(ErrorCode(599).retriable() && !ErrorCode(499).retriable() && !ErrorCode(777).retriable());
    }
}
