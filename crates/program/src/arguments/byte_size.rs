//! Numbers of bytes as users write them.

/// A number of bytes as a user writes it: `80GiB`, `80GB`, `512MiB`, or a number of bytes.
///
/// # Errors
/// Another text, or less than 1 byte.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" => 1024.0,
        "mib" => f64::from(1 << 20),
        "gib" => f64::from(1 << 30),
        "tib" => 1024.0 * f64::from(1 << 30),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => 0.0,
    };
    let bytes = number.parse::<f64>().map_or(0.0, |number| number * factor);
    match (1.0..1e18).contains(&bytes) {
        true => Ok(bytes as u64),
        false => {
            Err("expected a number of bytes from 1 to below 10^18, for example 80GiB, 80GB or 512MiB"
                .to_string())
        }
    }
}

/// So many bytes as [`parse_bytes`] reads them, to the byte: in the largest unit of which they are a whole number.
pub fn exact(bytes: u64) -> String {
    let units =
        [(1 << 30, "GiB"), (1_000_000_000, "GB"), (1 << 20, "MiB"), (1_000_000, "MB"), (1 << 10, "KiB")];
    let whole = units.into_iter().find(|(unit, _)| bytes.is_multiple_of(*unit));
    whole.map_or(bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::{exact, parse_bytes};

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["80GiB", "80GB", "600MiB", "3KiB", "4097", "1536MiB"] {
            assert_eq!(exact(parse_bytes(text).unwrap()), text);
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("80GiB", 80 << 30),
            ("80 GiB", 80 << 30),
            ("80gb", 80_000_000_000),
            ("1.5MiB", 3 << 19),
            ("4096", 4096),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "80 apples", "-3GiB", "0", "1e99", "99999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
