//! Each format written by hand and read back, then damaged.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::{TokenFile, TokenFormat, TokenWriter, Tokenizer, Tokens};

use crate::{assert_says, folder, names, write};

const IDS: [u32; 5] = [7, 0, 65535, 300, 50256];

fn all(file: &TokenFile) -> Vec<u32> {
    let mut ids = vec![0; file.len()];
    file.read(0, &mut ids).unwrap();
    ids
}

fn u16s(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|&id| u16::try_from(id).unwrap().to_le_bytes()).collect()
}

fn llm_c(magic: u32, version: u32, count: u32, ids: &[u8]) -> Vec<u8> {
    let mut header = [0u32; 256];
    header[..3].copy_from_slice(&[magic, version, count]);
    header.iter().flat_map(|field| field.to_le_bytes()).chain(ids.iter().copied()).collect()
}

/// Megatron's index of sequences of `lengths` tokens of `width` bytes.
fn index(dtype: u8, width: u64, lengths: &[u32]) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1u64.to_le_bytes());
    bytes.push(dtype);
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((lengths.len() as u64 + 1).to_le_bytes());
    bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    let mut at = 0u64;
    for length in lengths {
        bytes.extend(at.to_le_bytes());
        at += u64::from(*length) * width;
    }
    bytes.extend((0..=lengths.len() as u64).flat_map(u64::to_le_bytes));
    bytes
}

fn own(path: &Path, vocab: usize, ids: &[u32], tokenizer: Option<&Tokenizer>) -> PathBuf {
    let mut writer = TokenWriter::create(path, vocab).unwrap();
    for part in ids.chunks(2) {
        writer.push(part).unwrap();
    }
    writer.end_document();
    writer.finish(tokenizer).unwrap();
    path.to_path_buf()
}

#[test]
fn our_own_format() {
    let at = folder();
    for (vocab, width) in [(65536, 2), (65537, 4)] {
        let path = own(&at.path().join("t.bin"), vocab, &IDS, None);
        assert_eq!(fs::metadata(&path).unwrap().len(), 64 + 5 * width);
        let file = TokenFile::open(&path).unwrap();
        assert_eq!((file.format(), file.vocab_size(), file.len()), (TokenFormat::Phalanx, Some(vocab), 5));
        assert_eq!(all(&file), IDS);
        assert!(file.tokenizer().unwrap().is_none());
        let mut middle = [0; 2];
        file.read(2, &mut middle).unwrap();
        assert_eq!(middle, IDS[2..4]);
    }
    assert_eq!(names(at.path()), ["t.bin"]);
}

#[test]
fn the_header_is_pinned() {
    let at = folder();
    let path = own(&at.path().join("t"), 256, &[1, 2, 3], Some(&Tokenizer::byte()));
    let mut expected = b"PHXTOK\0\0\x01\0\0\0\x02\0\0\0".to_vec();
    for long in [256u64, 3, 1, 15, 0, 0] {
        expected.extend(long.to_le_bytes());
    }
    expected.extend([1, 0, 2, 0, 3, 0]);
    expected.extend(b"{\"kind\":\"byte\"}");
    assert_eq!(fs::read(path).unwrap(), expected);
}

#[test]
fn a_file_is_not_there_until_it_is_whole() {
    let at = folder();
    let path = own(&at.path().join("t.bin"), 256, &[1, 2, 3], None);
    let opened = TokenFile::open(&path).unwrap();
    let mut writer = TokenWriter::create(&path, 256).unwrap();
    writer.push(&[9; 100]).unwrap();
    assert_says(writer.push(&[1, 256]), &["token 101 ", "id 256", "0 to 255"]);
    drop(writer);
    assert_eq!(names(at.path()), ["t.bin"]);
    own(&path, 256, &[4, 5], None);
    assert_eq!(all(&opened), [1, 2, 3], "an open file stays what it was");
    assert_eq!(all(&TokenFile::open(&path).unwrap()), [4, 5]);
}

#[test]
fn foreign_formats_of_one_file() {
    let at = folder();
    let wide: Vec<u8> = IDS.iter().flat_map(|id| (id + 70000).to_le_bytes()).collect();
    let shifted: Vec<u32> = IDS.iter().map(|id| id + 70000).collect();
    let table = [
        ("nano.bin", u16s(&IDS), TokenFormat::NanoGpt, None, IDS.to_vec()),
        ("gpt2", llm_c(20240520, 1, 5, &u16s(&IDS)), TokenFormat::LlmC, Some(50257), IDS.to_vec()),
        ("llama3.bin", llm_c(20240801, 7, 5, &wide), TokenFormat::LlmC, Some(128256), shifted),
    ];
    for (name, bytes, format, vocab, ids) in table {
        let file = TokenFile::open(&write(at.path().join(name), bytes)).unwrap();
        assert_eq!((file.format(), file.vocab_size()), (format, vocab), "{name}");
        assert_eq!(all(&file), ids, "{name}");
    }
}

#[test]
fn megatron_pairs_of_every_width() {
    let at = folder();
    let bytes = |width: usize| -> Vec<u8> {
        (0..6i64).flat_map(|id| (id * 20).to_le_bytes().into_iter().take(width).collect::<Vec<_>>()).collect()
    };
    for (dtype, width) in [(1, 1), (2, 1), (3, 2), (4, 4), (5, 8), (8, 2)] {
        let data = write(at.path().join("corpus_text_document.bin"), bytes(width));
        let beside =
            write(at.path().join("corpus_text_document.idx"), index(dtype, width as u64, &[2, 0, 4]));
        for path in [data, beside, at.path().join("corpus_text_document")] {
            let file = TokenFile::open(&path).unwrap();
            assert_eq!((file.format(), file.vocab_size()), (TokenFormat::Megatron, None));
            assert_eq!(all(&file), [0, 20, 40, 60, 80, 100], "type {dtype}");
        }
    }
    // One more byte per sequence: the modes of multimodal data.
    let mut with_modes = index(8, 2, &[2, 0, 4]);
    with_modes.extend([0, 1, 0]);
    let beside = write(at.path().join("corpus_text_document.idx"), with_modes);
    assert_eq!(TokenFile::open(&beside).unwrap().len(), 6);
}

#[test]
fn damaged_megatron_pairs() {
    let at = folder();
    let (data, beside) = (at.path().join("m.bin"), at.path().join("m.idx"));
    let good = index(8, 2, &[2, 4]);
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let table: [(Vec<u8>, usize, &[&str]); 8] = [
        (good.clone(), 11, &["m.bin", "m.idx counts 6 tokens", "12 bytes", "has 11"]),
        (good[..20].to_vec(), 12, &["m.idx", "34 bytes", "has 20"]),
        (good[..good.len() - 1].to_vec(), 12, &["m.idx", "2 sequences, 3 documents", "82 bytes", "has 81"]),
        (changed(9, 2), 12, &["m.idx", "version 2"]),
        (changed(17, 6), 12, &["m.idx", "floating-point"]),
        (changed(17, 9), 12, &["m.idx", "id type 9"]),
        (changed(25, 255), 12, &["m.idx", "18374686479671623682 sequences"]),
        (changed(50, 2), 12, &["m.idx", "sequence 1 is 4 tokens at byte 2", "byte 4 was expected"]),
    ];
    for (index, data_bytes, parts) in table {
        write(data.clone(), vec![0; data_bytes]);
        write(beside.clone(), index);
        assert_says(TokenFile::open(&data), parts);
    }
    write(beside.clone(), &good);
    fs::remove_file(&data).unwrap();
    assert_says(TokenFile::open(&beside), &["no such file", "m.bin"]);
}

#[test]
fn damaged_files() {
    let at = folder();
    let whole = fs::read(own(&at.path().join("whole"), 256, &[1, 2, 3], Some(&Tokenizer::byte()))).unwrap();
    let changed = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        bytes
    };
    let llm = llm_c(20240520, 1, 5, &u16s(&IDS));
    let longer = [whole.clone(), vec![0]].concat();
    let table: [(&str, Vec<u8>, &[&str]); 16] = [
        ("t", whole[..40].to_vec(), &["cut short", "64 bytes", "has 40"]),
        ("t", whole[..70].to_vec(), &["3 tokens of 2 bytes", "85 bytes", "has 70"]),
        ("t", longer, &["85 bytes", "has 86"]),
        ("t", changed(8, 9), &["version 9"]),
        ("t", changed(12, 3), &["ids of 3 bytes"]),
        ("t", changed(31, 255), &["18374686479671623683 tokens"]),
        ("llm", llm[..1000].to_vec(), &["llm.c's", "1024 bytes", "has 1000"]),
        ("llm", llm[..llm.len() - 2].to_vec(), &["counts 5 tokens", "1034 bytes", "has 1032"]),
        ("llm", llm_c(20240520, 7, 0, &[]), &["goes with version 1, not 7"]),
        ("nano.bin", vec![1, 0, 2], &["nanoGPT's ids of 2 bytes", "has 3"]),
        ("none.bin", Vec::new(), &["it is empty"]),
        ("ckpt.bin", b"PK\x03\x04.".to_vec(), &["zip archive"]),
        ("text.txt", b"Some text that is not a token file.".to_vec(), &["not a token file", "UTF-8 text"]),
        ("ids.dat", vec![1, 0, 2, 0], &["not a token file", ".bin", "data.token_type", "nanoGPT"]),
        ("ids.npy", b"\x93NUMPY..".to_vec(), &["NumPy"]),
        ("lone.idx", index(8, 2, &[1]), &["no such file", "lone.bin"]),
    ];
    for (name, bytes, parts) in table {
        assert_says(TokenFile::open(&write(at.path().join(name), bytes)), parts);
    }
    assert_says(TokenFile::open(&at.path().join("gone.bin")), &["no such file", "gone.bin"]);
    assert_says(TokenFile::open(at.path()), &["folder"]);
    let garbled = write(at.path().join("g"), changed(70, b'?'));
    assert_says(TokenFile::open(&garbled).unwrap().tokenizer(), &["does not hold a usable tokenizer"]);
}

#[test]
fn ids_out_of_range_are_found_wherever_they_are() {
    let at = folder();
    let count = 100_000;
    for bad in [0, 1, 16_383, 16_384, 99_999] {
        let mut ids = vec![255; count];
        ids[bad] = 300;
        let file = TokenFile::open(&write(at.path().join("t.bin"), u16s(&ids))).unwrap();
        let position = format!("token {bad} ");
        assert_says(file.check_vocab(256), &[&position, "t.bin", "id 300", "256 ids (0 to 255)"]);
        file.check_vocab(301).unwrap();
    }
    // Signed ids and ids beyond 32 bits are reported as they are stored.
    for (dtype, width, bytes, id) in [
        (2, 1, (-3i8).to_le_bytes().to_vec(), "id -3"),
        (3, 2, (-300i16).to_le_bytes().to_vec(), "id -300"),
        (4, 4, i32::MIN.to_le_bytes().to_vec(), "id -2147483648"),
        (5, 8, (1i64 << 40).to_le_bytes().to_vec(), "id 1099511627776"),
    ] {
        let data = write(at.path().join("m.bin"), bytes);
        write(at.path().join("m.idx"), index(dtype, width, &[1]));
        let file = TokenFile::open(&data).unwrap();
        assert_eq!(all(&file), [u32::MAX]);
        assert_says(file.check_vocab(50257), &["token 0 ", id]);
    }
}

#[test]
fn a_file_that_changes_while_it_is_open_is_an_error_with_its_name() {
    let at = folder();
    let ids: Vec<u32> = (0..5000).map(|i| i % 200).collect();
    let path = own(&at.path().join("t.bin"), 256, &ids, Some(&Tokenizer::byte()));
    let whole = fs::read(&path).unwrap();
    let tokens = Tokens::open(&path).unwrap().limited_to(256);
    let mut out = vec![0; 3000];
    tokens.read(1000, &mut out).unwrap();
    // In place: the same file, other ids.
    let mut changed = whole.clone();
    changed[64 + 2 * 2345 + 1] = 9;
    fs::write(&path, &changed).unwrap();
    assert_says(tokens.read(1000, &mut out), &["token 2345 of", "t.bin", "were changed while", "256 ids"]);
    tokens.read(0, &mut out[..1000]).unwrap();
    // In place: the same file, cut short.
    fs::write(&path, &whole[..5000]).unwrap();
    let lengths = format!("had {} bytes and has 5000", whole.len());
    assert_says(tokens.read(1000, &mut out), &["t.bin", "was shortened while", &lengths]);
}

#[test]
fn a_scan_tells_the_checksum_of_the_whole_file() {
    let at = folder();
    // Sizes about those of windows and blocks, up to several blocks.
    const BLOCK: usize = 1 << 23;
    for bytes in [0, 2, 1 << 20, BLOCK - 2, BLOCK, BLOCK + 2, 2 * BLOCK + 2, 5 * BLOCK - 1000] {
        let content: Vec<u8> = (0..bytes / 2).flat_map(|i| ((i % 251) as u16).to_le_bytes()).collect();
        let whole = llm_c(20240520, 1, (bytes / 2) as u32, &content);
        let path = write(at.path().join("t"), &whole);
        let scan = TokenFile::open(&path).unwrap().scan(251).unwrap();
        assert_eq!(scan.blake3, blake3::hash(&whole).to_hex().as_str(), "{bytes} bytes");
        assert!(scan.out_of_range.is_none());
    }
    // The first of two tokens out of range is reported, in any block.
    let mut ids = vec![0u8; 3 * BLOCK];
    (ids[2 * BLOCK], ids[BLOCK + 1000]) = (9, 8);
    let path = write(at.path().join("t"), llm_c(20240520, 1, (3 * BLOCK / 2) as u32, &ids));
    let found = TokenFile::open(&path).unwrap().scan(8).unwrap().out_of_range.unwrap().to_string();
    assert!(found.contains(&format!("token {} ", (BLOCK + 1000) / 2)) && found.contains("id 8"), "{found}");
}
