//! The decision table of recovery. Every row is a [`Case`]; every case is reached by a test (`each_case_is_reached`).
//!
//! For a place where the next extent of the chain is expected:
//!
//! | finding | nothing of the chain behind it | extents behind it, none proves a sync | a sync beyond it is proved |
//! |---|---|---|---|
//! | whole | accept | accept | accept |
//! | no header | `LogEnds` end | `ReorderedTail` cut | `HeaderDamaged` skip |
//! | header of a dead life | `OldLifeBehind` end | `ReorderedOverOldLife` cut | `LostWrite` skip |
//! | header that does not chain | `OffChain` cut | `OffChainReordered` cut | `ChainBroken` skip |
//! | header chains, directory is not whole | `TornExtent` cut | `TornExtentReordered` cut | `DirectoryDamaged` skip |
//! | a run is not whole (looked at only past the proved sync) | `TornRun` cut | `TornRunReordered` cut | |
//!
//! For a segment file:
//!
//! | which | trailer, pages | extents | decision |
//! |---|---|---|---|
//! | not the newest | whole | | `Sealed` fences only |
//! | not the newest | not whole | | `FooterLost` walk |
//! | newest | whole | last is a clean checkpoint | `StoppedClean` checkpoint only |
//! | newest | whole | else | `SealedInRoll` checkpoint and pages |
//! | newest | trailer whole, pages or checkpoint not | | `FooterDamaged` walk, rewrite footer; go on in a new segment |
//! | newest | no trailer | header and first extent whole | `Open` walk, go on in it |
//! | newest | no trailer | header not whole, first extent chains | `SegmentHeaderLost` walk, rewrite header |
//! | newest | no trailer | first extent damaged | `FirstExtentDamaged` walk, skip |
//! | newest | no trailer | nothing whole | `DiedInRoll` remove it, end at the segment before |
//! | none | | | `NewLog` start |

use crate::ids::SegmentSequence;

macro_rules! cases {
    ($($(#[$doc:meta])* $case:ident,)*) => {
        /// A row of the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Case {
            $($(#[$doc])* $case,)*
        }

        impl Case {
            /// Every case there is.
            pub const ALL: &'static [Self] = &[$(Self::$case,)*];
        }
    };
}

cases! {
    /// The extent that belongs here.
    WholeExtent,
    /// Nothing was written here: the usual end after an unclean stop.
    LogEnds,
    /// The header is missing, later extents were written, none is synced: the device reordered unsynced writes.
    ReorderedTail,
    /// The header is missing, and a later extent knows it was synced.
    HeaderDamaged,
    /// An extent of a recycled segment or behind an old cut: the log ends before it.
    OldLifeBehind,
    /// The same, and later extents of this life were written, none synced.
    ReorderedOverOldLife,
    /// An extent of an older life where a synced one must be: the device lost a write that it had confirmed.
    LostWrite,
    /// A whole header that names another predecessor.
    OffChain,
    /// The same, with unsynced extents behind.
    OffChainReordered,
    /// The same, where a synced extent must be.
    ChainBroken,
    /// The header chains, its directory was not written in full.
    TornExtent,
    /// The same, with unsynced extents behind.
    TornExtentReordered,
    /// The header chains, its directory is damaged: known to be synced.
    DirectoryDamaged,
    /// Header and directory are whole, a run is not, and no sync is known.
    TornRun,
    /// The same, with unsynced extents behind.
    TornRunReordered,
    /// An older segment with its trailer.
    Sealed,
    /// An older segment whose trailer or fences are not whole.
    FooterLost,
    /// The newest segment, sealed after a clean stop.
    StoppedClean,
    /// The newest segment, sealed before its successor could be made.
    SealedInRoll,
    /// The newest segment, with a trailer but not the rest of what it promises.
    FooterDamaged,
    /// The newest segment, as an unclean stop leaves it.
    Open,
    /// The newest segment without its header.
    SegmentHeaderLost,
    /// The newest segment without its first extent, which was synced.
    FirstExtentDamaged,
    /// The newest segment died before its first checkpoint was whole.
    DiedInRoll,
    /// No segment: the first start.
    NewLog,
}

/// A case, and where it was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaseSeen {
    /// Which.
    pub case: Case,
    /// In which segment.
    pub segment: SegmentSequence,
    /// Where in its file; 0 for the segment as a whole.
    pub place: u64,
}

/// What stands where the next extent is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The extent that chains, header and directory checked.
    Whole,
    /// No header, or one with a wrong CRC, or unreadable bytes.
    NoHeader,
    /// A whole header of a lower sequence or incarnation, of another log, or with an impossible synced position.
    OldLife,
    /// A whole header of this life or a later one that does not follow the last extent.
    OffChain,
    /// The header that follows, but its directory is not whole.
    TornBody,
    /// Header and directory follow, but a run is not whole.
    TornRun,
}

/// What lies behind the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// No extent that could follow.
    Nothing,
    /// Extents that could follow; none proves that the place was synced.
    Unsynced,
    /// Something proves that the place was synced.
    Synced,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Take the extent.
    Accept,
    /// The log ends here.
    End,
    /// This is damage: report it and go on behind it.
    Skip,
}

/// The first table.
///
/// # Panics
/// For a torn run before a proved sync: runs are looked at only past it.
#[must_use]
pub fn decide(finding: Finding, behind: Behind) -> (Case, Verdict) {
    use Behind::{Nothing, Synced, Unsynced};
    use Verdict::{Accept, End, Skip};
    match (finding, behind) {
        (Finding::Whole, _) => (Case::WholeExtent, Accept),
        (Finding::NoHeader, Nothing) => (Case::LogEnds, End),
        (Finding::NoHeader, Unsynced) => (Case::ReorderedTail, End),
        (Finding::NoHeader, Synced) => (Case::HeaderDamaged, Skip),
        (Finding::OldLife, Nothing) => (Case::OldLifeBehind, End),
        (Finding::OldLife, Unsynced) => (Case::ReorderedOverOldLife, End),
        (Finding::OldLife, Synced) => (Case::LostWrite, Skip),
        (Finding::OffChain, Nothing) => (Case::OffChain, End),
        (Finding::OffChain, Unsynced) => (Case::OffChainReordered, End),
        (Finding::OffChain, Synced) => (Case::ChainBroken, Skip),
        (Finding::TornBody, Nothing) => (Case::TornExtent, End),
        (Finding::TornBody, Unsynced) => (Case::TornExtentReordered, End),
        (Finding::TornBody, Synced) => (Case::DirectoryDamaged, Skip),
        (Finding::TornRun, Nothing) => (Case::TornRun, End),
        (Finding::TornRun, Unsynced) => (Case::TornRunReordered, End),
        (Finding::TornRun, Synced) => panic!("runs are looked at only past the proved sync"),
    }
}

/// What a segment's trailer and footer turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Footer {
    /// There is no trailer.
    Missing,
    /// There is a trailer, but not all that is needed of what it promises.
    Damaged,
    /// Trailer, and whatever is needed of the pages.
    Whole {
        /// The segment's last extent is a clean checkpoint.
        clean: bool,
    },
}

/// What walking a segment gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstExtent {
    /// Its first extent was accepted.
    Whole,
    /// Its first extent was skipped as damaged.
    Skipped,
    /// Nothing was accepted.
    Missing,
}

/// The second table, for a segment that has newer ones behind it.
#[must_use]
pub fn decide_older(footer: Footer) -> Case {
    match footer {
        Footer::Whole { .. } => Case::Sealed,
        Footer::Missing | Footer::Damaged => Case::FooterLost,
    }
}

/// The second table, for the footer of the newest segment. `None`: the extents decide, see [`decide_newest_walked`].
#[must_use]
pub fn decide_newest(footer: Footer) -> Option<Case> {
    match footer {
        Footer::Whole { clean: true } => Some(Case::StoppedClean),
        Footer::Whole { clean: false } => Some(Case::SealedInRoll),
        Footer::Damaged => Some(Case::FooterDamaged),
        Footer::Missing => None,
    }
}

/// The second table, for the newest segment without a trailer.
#[must_use]
pub fn decide_newest_walked(header_whole: bool, first: FirstExtent) -> Case {
    match (header_whole, first) {
        (true, FirstExtent::Whole) => Case::Open,
        (false, FirstExtent::Whole) => Case::SegmentHeaderLost,
        (_, FirstExtent::Skipped) => Case::FirstExtentDamaged,
        (_, FirstExtent::Missing) => Case::DiedInRoll,
    }
}
