//! Two clocks, one of which is set now and then; and when retention by age may believe it, worked out anew.

const HOUR_MS: i64 = 3_600_000;
/// Differences that may be slewing.
const NEAR_MS: i64 = 60_000;
/// Wall time at the beginning of every run.
const BEGAN_MS: i64 = 1_700_000_000_000;

#[derive(Clone, Debug, Default)]
pub struct Wall {
    /// Time that has really passed.
    pub passed_ms: u64,
    /// How far the wall clock is off.
    skew_ms: i64,
    /// Any step in this run, also while no broker ran.
    pub stepped: bool,
    /// Since a process began or trusted the clock: the skew then, and since when another one has been steady.
    believed: Option<i64>,
    other: Option<(i64, i64)>,
}

impl Wall {
    pub fn now_ms(&self) -> i64 {
        BEGAN_MS + self.passed() + self.skew_ms
    }

    fn passed(&self) -> i64 {
        i64::try_from(self.passed_ms).expect("a short run")
    }

    /// Somebody sets the clock.
    pub fn step(&mut self, by_ms: i64) {
        self.skew_ms += by_ms;
        self.stepped = true;
    }

    /// A new process knows nothing of the clock before.
    pub fn process_begins(&mut self) {
        self.believed = None;
        self.other = None;
    }

    /// A look at the clock: whether it may be believed.
    pub fn may_be_believed(&mut self) -> bool {
        let believed = *self.believed.get_or_insert(self.skew_ms);
        if (self.skew_ms - believed).abs() <= NEAR_MS {
            self.other = None;
            self.believed = Some(self.skew_ms);
            return true;
        }
        match self.other {
            Some((skew, since)) if (self.skew_ms - skew).abs() <= NEAR_MS => {
                let steady = self.passed() - since >= HOUR_MS;
                if steady {
                    self.believed = Some(self.skew_ms);
                    self.other = None;
                } else {
                    self.other = Some((self.skew_ms, since));
                }
                steady
            }
            _ => {
                self.other = Some((self.skew_ms, self.passed()));
                false
            }
        }
    }
}
