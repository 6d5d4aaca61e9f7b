//! Files that are no token files, by their first bytes: archives, arrays, text, the files of other programs.

use crate::magic::{TEXT_TO_IDS, TO_IDS, WITHOUT_IDS, format_of};

/// Description of a file by its appearance, with advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// In words: "it is compressed by gzip".
    pub is: String,
    /// Advice to the user.
    pub advice: String,
}

impl Look {
    pub(super) fn new(is: impl Into<String>, advice: impl Into<String>) -> Look {
        Look { is: is.into(), advice: advice.into() }
    }

    pub(super) fn of_type(is: &str, name: &str) -> Look {
        Look::new(is, format!("set data.token_type = {name:?}"))
    }
}

const FETCH: &str = "fetch it again, and look at the address and the answer of the server";

/// Describes a file with these first bytes, if they are known; `bytes` is the size of the file.
pub(super) fn by_magic(head: &[u8], bytes: u64) -> Option<Look> {
    if let Some(format) = format_of(head) {
        return Some(Look::new(format!("it is {}", format.is), format.for_ids()));
    }
    if head.starts_with(b"\xef\xbb\xbf") {
        return Some(Look::new("it is UTF-8 text", TEXT_TO_IDS));
    }
    if let Some((length, json)) = head.split_first_chunk()
        && json.starts_with(b"{")
        && (2..bytes.saturating_sub(7)).contains(&u64::from_le_bytes(*length))
    {
        return Some(Look::new("it is a safetensors file", WITHOUT_IDS));
    }
    if let [0x80, protocol @ 2..=5, next, ..] = head
        && (*next == 0x95 || (*protocol < 4 && b"}](cXq\x8aJKMN".contains(next)))
    {
        return Some(Look::new("it is a Python pickle, as older checkpoints of PyTorch are", TO_IDS));
    }
    near_miss(head, bytes)
}

/// A header of a known token file of which the first bytes are wrong.
fn near_miss(head: &[u8], bytes: u64) -> Option<Look> {
    let again = "copy the file or make it again";
    let own = head.iter().zip(super::own::MAGIC).filter(|(found, magic)| found == magic).count();
    if own >= 6 {
        return Some(Look::new("it is a Phalanx token file whose first bytes are damaged", again));
    }
    let (header, _) = head.first_chunk::<1024>()?.as_chunks::<4>();
    let field = |at: usize| u32::from_le_bytes(header[at]);
    let count = u64::from(field(2));
    let has_size =
        [2, 4].contains(&(bytes - 1024).checked_div(count)?) && (bytes - 1024).is_multiple_of(count);
    let is_header = has_size && field(0) > 0 && header[3..].iter().all(|word| *word == [0; 4]);
    let what =
        format!("it has a header like llm.c's of {count} tokens, with the unknown magic number {}", field(0));
    is_header.then(|| Look::new(what, again))
}

/// Describes the text that the bytes are, if they are text. `head` is the beginning of the file, `sample` has bytes of all its parts.
pub(super) fn text(head: &[u8], sample: &[u8]) -> Option<Look> {
    let is_printable = |byte: &&u8| matches!(byte, 9..=13 | 27 | 32..=126);
    let control = head.iter().filter(|byte| **byte < 32 && !is_printable(byte)).count();
    let utf8 = str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
    let printable = sample.iter().filter(is_printable).count();
    let beginning = String::from_utf8_lossy(&head[..head.len().min(200)]).trim_start().to_lowercase();
    let kind = match () {
        () if sample.contains(&0) => return None,
        () if beginning.starts_with("<!doctype html") || beginning.starts_with("<html") => {
            return Some(Look::new(
                "it is an HTML page, perhaps the answer of a server in place of the file",
                FETCH,
            ));
        }
        () if utf8 && 50 * control <= head.len() => "UTF-8 text",
        () if 10 * printable >= 8 * sample.len() => "text in an 8-bit encoding, as Latin-1",
        () => return None,
    };
    let shown: String = String::from_utf8_lossy(head).chars().take(24).collect();
    Some(Look::new(format!("it is {kind} ({shown:?} ...)"), TEXT_TO_IDS))
}
