//! Hours of the day, by the clock of this machine.

/// Minutes of a day.
const DAY: u32 = 24 * 60;

/// From one time of the day to another, over midnight if that is earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hours {
    from: u32,
    to: u32,
}

impl Hours {
    /// Reads `22:00-06:00`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wanted = || format!("wanted hours as in `22:00-06:00`, not `{text}`");
        let (from, to) = text.split_once('-').ok_or_else(wanted)?;
        let (from, to) = (time(from).ok_or_else(wanted)?, time(to).ok_or_else(wanted)?);
        match from == to {
            true => Err(format!("no hours: `{text}` ends where it begins")),
            false => Ok(Self { from, to }),
        }
    }

    /// Whether a minute of the day lies in them.
    #[cfg(any(feature = "torch", test))]
    pub(crate) fn contain(self, minute: u32) -> bool {
        match self.from < self.to {
            true => (self.from..self.to).contains(&minute),
            false => minute >= self.from || minute < self.to,
        }
    }
}

fn time(text: &str) -> Option<u32> {
    let (hours, minutes) = text.trim().split_once(':')?;
    let number = |text: &str| (text.len() == 2).then(|| text.parse::<u32>().ok()).flatten();
    let (hours, minutes) = (number(hours)?, number(minutes)?);
    let all = hours * 60 + minutes;
    (minutes < 60 && all <= DAY).then_some(all)
}

/// Returns the minute of the day, here and now.
#[cfg(any(feature = "torch", test))]
pub(crate) fn minute_of_day() -> u32 {
    let mut now: libc::time_t = 0;
    #[expect(unsafe_code, reason = "std does not know in which zone the machine is")]
    // SAFETY: both calls fill in what they are given; all-zero is a valid `tm`.
    let local = unsafe {
        libc::time(&mut now);
        let mut local: libc::tm = std::mem::zeroed();
        libc::localtime_r(&now, &mut local);
        local
    };
    let minute = local.tm_hour * 60 + local.tm_min;
    u32::try_from(minute).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_may_go_over_midnight() {
        let night = Hours::parse("22:00-06:00").unwrap();
        for (minute, inside) in
            [(22 * 60, true), (DAY - 1, true), (0, true), (359, true), (360, false)]
        {
            assert_eq!(night.contain(minute), inside, "{minute}");
        }
        let noon = Hours::parse("12:30-13:15").unwrap();
        for (minute, inside) in [(749, false), (750, true), (794, true), (795, false)] {
            assert_eq!(noon.contain(minute), inside, "{minute}");
        }
        assert!(Hours::parse("18:00-24:00").unwrap().contain(DAY - 1));
        for odd in ["", "22-6", "22:00", "22:60-23:00", "25:00-26:00", "1:00-2:00", "-1:00-02:00"] {
            assert!(Hours::parse(odd).is_err(), "{odd}");
        }
        assert!(Hours::parse("06:00-06:00").unwrap_err().contains("ends where it begins"));
        assert!(minute_of_day() < DAY);
    }
}
