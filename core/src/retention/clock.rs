//! Whether wall time can be believed: retention by age must not empty topics because somebody set the clock.

/// Wall time may drift from monotonic time so far between two looks: slewing, leap seconds, a coarse step at boot.
const LEAP_MS: i64 = 60_000;
/// After a leap retention by age pauses until the new time has been steady for so long: an operator has seen the warning by
/// then, and a clock that was set wrong has been set right.
const PAUSE_MS: i64 = 3_600_000;

/// What the clock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockVerdict {
    /// This is the time.
    Steady(i64),
    /// Wall time has just leapt by so much; said once for each leap.
    Leapt {
        /// Forward, or back when negative.
        by_ms: i64,
    },
    /// It has leapt a while ago.
    Paused,
}

/// Compares wall time with monotonic time at each look.
#[derive(Clone, Copy, Debug, Default)]
pub struct RetentionClock {
    /// Wall time minus monotonic time, as believed.
    believed: Option<i64>,
    /// The same since a leap, and the monotonic time of that.
    leapt: Option<(i64, i64)>,
}

impl RetentionClock {
    /// Looks at both times, in milliseconds.
    pub fn look(&mut self, wall_ms: i64, monotonic_ms: u64) -> ClockVerdict {
        let monotonic_ms = i64::try_from(monotonic_ms).unwrap_or(i64::MAX);
        let apart = wall_ms.saturating_sub(monotonic_ms);
        let near = |other: i64| apart.saturating_sub(other).saturating_abs() <= LEAP_MS;
        let believed = *self.believed.get_or_insert(apart);
        if near(believed) {
            self.believed = Some(apart);
            self.leapt = None;
            return ClockVerdict::Steady(wall_ms);
        }
        match self.leapt {
            Some((since, at_ms)) if near(since) => {
                if monotonic_ms.saturating_sub(at_ms) < PAUSE_MS {
                    self.leapt = Some((apart, at_ms));
                    return ClockVerdict::Paused;
                }
                self.believed = Some(apart);
                self.leapt = None;
                ClockVerdict::Steady(wall_ms)
            }
            _ => {
                self.leapt = Some((apart, monotonic_ms));
                ClockVerdict::Leapt { by_ms: apart.saturating_sub(believed) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;

    #[test]
    fn a_leap_is_told_once_and_pauses_until_the_new_time_has_been_steady() {
        let mut clock = RetentionClock::default();
        assert_eq!(clock.look(1_000_000, 0), ClockVerdict::Steady(1_000_000));
        assert_eq!(clock.look(1_001_000, 1_000), ClockVerdict::Steady(1_001_000));
        let year = 31_536_000_000;
        assert_eq!(clock.look(year + 1_002_000, 2_000), ClockVerdict::Leapt { by_ms: year });
        assert_eq!(clock.look(year + 1_003_000, 3_000), ClockVerdict::Paused);
        let later = HOUR + 2_000;
        let wall = year + 1_000_000 + later as i64;
        assert_eq!(clock.look(wall, later), ClockVerdict::Steady(wall));
    }

    #[test]
    fn a_clock_that_is_set_back_right_is_believed_at_once() {
        let mut clock = RetentionClock::default();
        clock.look(1_000_000, 0);
        assert!(matches!(clock.look(-5_000_000, 1_000), ClockVerdict::Leapt { .. }));
        assert_eq!(clock.look(1_002_000, 2_000), ClockVerdict::Steady(1_002_000));
    }

    #[test]
    fn slewing_is_no_leap_however_far_it_goes() {
        let mut clock = RetentionClock::default();
        for second in 0..10_000_u64 {
            // Ten per cent fast.
            let wall = 5_000_000 + second as i64 * 1_100;
            assert_eq!(clock.look(wall, second * 1_000), ClockVerdict::Steady(wall));
        }
    }

    #[test]
    fn a_second_leap_starts_the_pause_anew() {
        let mut clock = RetentionClock::default();
        clock.look(0, 0);
        assert!(matches!(clock.look(10_000_000, 1_000), ClockVerdict::Leapt { .. }));
        assert!(matches!(clock.look(90_000_000, HOUR), ClockVerdict::Leapt { .. }));
        assert_eq!(clock.look(90_000_000 + HOUR as i64 / 2, HOUR + HOUR / 2), ClockVerdict::Paused);
    }
}
