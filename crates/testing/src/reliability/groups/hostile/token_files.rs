//! Token files of the four formats whose headers announce more than the file has.

use std::fs;

use crate::hostile::Random;
use crate::reliability::groups::hostile::{Attempt, flip};
use crate::reliability::groups::pipes::prepared;
use crate::reliability::world::Case;

/// Counts that do not fit.
const COUNTS: [u64; 10] =
    [0, 1, 1999, 2001, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, i64::MAX as u64, u64::MAX];

/// Tokens of a file.
const TOKENS: usize = 2000;

const TOML: &str = "[model]\nlayers = 2\nhidden = 16\nheads = 4\nseq = 16\nvocab = 256\n[data]\ntokens = \"tokens.bin\"\n\
    [batch]\nglobal = 8\n[schedule]\nkind = \"constant\"\n[train]\nsteps = 3\neval_samples = 8\nthreads = 1\n";

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    case.write("tokens.toml", TOML)?;
    let format = random.below(4);
    let input = match format {
        0 => own(case, random)?,
        1 => llm_c(case, random)?,
        2 => megatron(case, random)?,
        _ => nano_gpt(case, random)?,
    };
    let words: &[&str] = match random.below(3) {
        0 => &["inspect", "tokens.bin", "--verify"],
        1 => &["plan", "tokens.toml"],
        _ => &["train", "tokens.toml", "--quiet"],
    };
    Ok(Attempt::new(input, words.iter().copied()))
}

/// Ids of 16 bits, all below the vocabulary but one where `beyond` says so.
fn ids(random: &mut Random, beyond: bool) -> Vec<u8> {
    let strange = random.below(TOKENS);
    let id = |at: usize| if beyond && at == strange { 65535 } else { (at * 7 % 256) as u16 };
    (0..TOKENS).flat_map(|at| id(at).to_le_bytes()).collect()
}

fn own(case: &Case<'_>, random: &mut Random) -> Result<String, String> {
    let path = prepared(case.world)?.join("r/tokens.bin");
    let mut bytes = fs::read(path).map_err(|error| error.to_string())?;
    let input = match random.below(3) {
        0 => {
            flip(&mut bytes[..64], random);
            "an own header with flipped bytes".to_string()
        }
        1 => {
            let at = 8 * random.below(8);
            let count = *random.pick(&COUNTS);
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            format!("an own header with {count} at byte {at}")
        }
        _ => {
            let at = 4 * random.below(16);
            let count = *random.pick(&COUNTS) as u32;
            bytes[at..at + 4].copy_from_slice(&count.to_le_bytes());
            format!("an own header with {count} at byte {at}")
        }
    };
    case.write("tokens.bin", bytes)?;
    Ok(input)
}

fn llm_c(case: &Case<'_>, random: &mut Random) -> Result<String, String> {
    let magic: i32 = *random.pick(&[20240520, 20240801]);
    let version = *random.pick(&[1, 1, 1, 7, 0, -1, i32::MAX]);
    let count = *random.pick(&[TOKENS as i32, TOKENS as i32, TOKENS as i32 + 1, 0, -1, i32::MAX, i32::MIN]);
    let mut header = vec![0i32; 256];
    header[..3].copy_from_slice(&[magic, version, count]);
    let mut bytes: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
    let beyond = random.chance(0.3);
    bytes.extend(ids(random, beyond));
    if random.chance(0.3) {
        bytes.truncate(random.below(bytes.len()));
    }
    case.write("tokens.bin", &bytes)?;
    Ok(format!("llm.c: magic {magic}, version {version}, {count} tokens, {} bytes", bytes.len()))
}

fn megatron(case: &Case<'_>, random: &mut Random) -> Result<String, String> {
    let beyond = random.chance(0.3);
    case.write("tokens.bin", ids(random, beyond))?;
    let kind = *random.pick(&[8u8, 8, 8, 1, 2, 3, 4, 5, 6, 0, 255]);
    let lied = random.chance(0.5);
    let sequences = if lied { *random.pick(&COUNTS) } else { 2 };
    let documents = if random.chance(0.2) { *random.pick(&COUNTS) } else { 3 };
    let lengths: [i32; 2] =
        *random.pick(&[[1000, 1000], [1000, 1000], [0, 2000], [-1, 2001], [i32::MAX, i32::MAX], [999, 1000]]);
    let offsets: [i64; 2] = *random.pick(&[[0, 2000], [0, 2000], [0, i64::MAX], [-1, 0], [2000, 0]]);
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(kind);
    index.extend(sequences.to_le_bytes());
    index.extend(documents.to_le_bytes());
    index.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    index.extend(offsets.iter().flat_map(|offset| offset.to_le_bytes()));
    index.extend([0i64, 1, 2].iter().flat_map(|document| document.to_le_bytes()));
    if random.chance(0.2) {
        index.truncate(random.below(index.len()));
    }
    case.write("tokens.idx", &index)?;
    Ok(format!(
        "Megatron: type {kind}, {sequences} sequences of {lengths:?} at {offsets:?}, {documents} documents"
    ))
}

fn nano_gpt(case: &Case<'_>, random: &mut Random) -> Result<String, String> {
    let beyond = random.chance(0.5);
    let mut bytes = ids(random, beyond);
    bytes.truncate(*random.pick(&[0, 1, 2, 33, 34, 35, 3999, 4000]));
    case.write("tokens.bin", &bytes)?;
    Ok(format!("nanoGPT: {} bytes", bytes.len()))
}
