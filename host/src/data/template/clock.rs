//! `strftime_now` of chat templates.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Seconds since 1970 in UTC. `transformers` takes local time; a template prints the date at most, and
/// UTC makes a run the same on every machine.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// C's `strftime` in the C locale, for the directives that chat templates use.
pub(super) fn strftime(format: &str, unix_seconds: u64) -> Result<String, String> {
    let (year, month, day) = civil_date(unix_seconds / 86_400);
    let weekday = DAYS[((unix_seconds / 86_400 + 4) % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let seconds = unix_seconds % 86_400;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let number = |value: u64| if padded { format!("{value:02}") } else { value.to_string() };
        let text = match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100),
            Some('m') => number(month),
            Some('d') => number(day),
            Some('H') => number(hour),
            Some('I') => number(hour12),
            Some('M') => number(minute),
            Some('S') => number(second),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            other => {
                let name = other.map(String::from).unwrap_or_default();
                return Err(format!("strftime_now: the directive %{name} is not known"));
            }
        };
        out.push_str(&text);
    }
    Ok(out)
}

/// Year, month and day of a day number since 1970-01-01, in the Gregorian calendar.
///
/// Years are counted from March, so that the leap day comes last, in eras of 400 years (146,097 days).
fn civil_date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468; // days since 0000-03-01
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153; // 0 is March
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (year_of_era + era * 400 + later, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected values from `date -u -d @SECONDS`.
    #[test]
    fn dates_agree_with_the_system_calendar() {
        let full = "%Y-%m-%d %H:%M:%S %a %A %b %B %-d %I %p %y %%";
        let cases = [
            (0, "1970-01-01 00:00:00 Thu Thursday Jan January 1 12 AM 70 %"),
            (951_782_400, "2000-02-29 00:00:00 Tue Tuesday Feb February 29 12 AM 00 %"),
            (1_764_460_799, "2025-11-29 23:59:59 Sat Saturday Nov November 29 11 PM 25 %"),
            (4_107_542_400, "2100-03-01 00:00:00 Mon Monday Mar March 1 12 AM 00 %"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(full, seconds).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn an_unknown_directive_is_named() {
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
    }
}
