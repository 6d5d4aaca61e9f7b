//! Files of bare ids that are right, and files of other kinds that could be taken for them.

use phalanx_data::{TokenFile, TokenType};

use crate::{assert_says, folder, write};

/// A number from 0 to 1 that depends on `at` alone.
fn number(at: usize) -> f64 {
    let mixed = (at as u64 + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .rotate_left(29)
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

/// Ids as a tokenizer makes them of text: small ones are frequent, and some have the end of their range.
fn ids(count: usize, vocab: usize) -> Vec<u64> {
    (0..count).map(|at| (vocab as f64).powf(number(at)) as u64 - 1).collect()
}

fn bytes(ids: &[u64], width: usize) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)).collect()
}

fn reversed(ids: &[u64], width: usize) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_be_bytes().into_iter().skip(8 - width)).collect()
}

const TEXT: &str = "It was the best of times, it was the worst of times, it was the age of wisdom.\n";

#[test]
fn right_files_of_every_type_look_right() {
    let at = folder();
    for (vocab, types) in [
        (3, "u8 u16 u32 i64"),
        (65, "u8 u16 u32 i64"),
        (256, "u8 u16 u32 i64"),
        (300, "u16 u32 i64"),
        (50_257, "u16 u32 i64"),
        (65_536, "u16 u32 i64"),
        (128_256, "u32 i64"),
        (262_144, "u32 i64"),
    ] {
        for name in types.split(' ') {
            let (given, width) = match name {
                "u8" => (TokenType::U8, 1),
                "u16" => (TokenType::U16, 2),
                "u32" => (TokenType::U32, 4),
                _ => (TokenType::I64, 8),
            };
            for count in [4, 40, 200, 2000, 30_000, 1_200_000] {
                let ids = ids(count, vocab);
                let file =
                    TokenFile::open_as(&write(at.path().join("t.bin"), bytes(&ids, width)), given).unwrap();
                assert_eq!(file.look().unwrap(), None, "{count} ids of {vocab}, {name}");
                assert_eq!((file.len(), file.id_type()), (count, name));
                let mut read = vec![0; count];
                file.read(0, &mut read).unwrap();
                assert!(read.iter().zip(&ids).all(|(read, id)| u64::from(*read) == *id), "{vocab} {name}");
            }
        }
    }
    // Frequent and evenly spread ids, and their order as a counter.
    let even: Vec<u64> = (0..50_000).map(|at| (number(at) * 50_257.0) as u64).collect();
    let counter: Vec<u64> = (0..60_000).collect();
    for ids in [even, counter] {
        let file = TokenFile::open(&write(at.path().join("t.bin"), bytes(&ids, 2))).unwrap();
        assert_eq!(file.look().unwrap(), None);
    }
}

/// Each kind of content, and words of what it looks like as 16-bit ids.
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn wrong() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let (gpt2, bytes_only, llama) = (ids(5000, 50_257), ids(5000, 256), ids(5000, 128_256));
    let noise: Vec<u8> = (0..60_000).map(|at| (number(at) * 256.0) as u8).collect();
    let float = |at: usize| (number(at) - 0.5) as f32;
    let halves = (0..4000).flat_map(|at| ((float(at).to_bits() >> 16) as u16).to_le_bytes()).collect();
    let with_magic = |magic: &[u8]| [magic, &noise[..4000]].concat();
    let safetensors =
        [&80u64.to_le_bytes(), &b"{\"w\":{\"dtype\":\"F32\",\"shape\":[10],\"data_offsets\":[0,40]}}"[..]];
    let mut hole = bytes(&gpt2, 2);
    hole.resize(40_000, 0);
    let mut llm_c: Vec<u8> = [777u32, 1, 5000].iter().flat_map(|word| word.to_le_bytes()).collect();
    llm_c.resize(1024, 0);
    llm_c.extend(bytes(&gpt2, 2));
    vec![
        ("u32", bytes(&gpt2, 4), "data.token_type = \"u32\""),
        ("u32 of bytes", bytes(&bytes_only, 4), "data.token_type = \"u32\""),
        ("u32, large vocabulary", bytes(&llama, 4), "data.token_type = \"u32\""),
        ("i64", bytes(&gpt2, 8), "data.token_type = \"i64\""),
        ("i64 of bytes", bytes(&bytes_only, 8), "data.token_type = \"i64\""),
        ("i64, large vocabulary", bytes(&llama, 8), "data.token_type = \"i64\""),
        ("u8", bytes(&ids(5000, 65), 1), "data.token_type = \"u8\""),
        ("u8 of few", bytes(&ids(5000, 5), 1), "data.token_type = \"u8\""),
        ("u16, big-endian", reversed(&gpt2, 2), "first byte is the highest"),
        ("u16 of bytes, big-endian", reversed(&bytes_only, 2), "first byte is the highest"),
        ("u32, big-endian", reversed(&gpt2, 4), "first byte is the highest"),
        ("u32, big-endian, large vocabulary", reversed(&llama, 4), "first byte is the highest"),
        ("i64, big-endian", reversed(&gpt2, 8), "first byte is the highest"),
        ("f32", (0..4000).flat_map(|at| float(at).to_le_bytes()).collect(), "32-bit floating-point"),
        (
            "f64",
            (0..4000).flat_map(|at| f64::from(float(at)).to_le_bytes()).collect(),
            "64-bit floating-point",
        ),
        ("bf16", halves, "16-bit floating-point"),
        (
            "ids as f32",
            gpt2.iter().flat_map(|id| (*id as f32).to_le_bytes()).collect(),
            "32-bit floating-point",
        ),
        ("zeros", vec![0; 4000], "one id only, 0"),
        ("one id", bytes(&vec![50_256; 2000], 2), "one id only, 50256"),
        ("one id of two letters", b"Dr".repeat(500), "one id only, 29252"),
        ("a hole", hole, "pages of 4096 bytes that were looked at are zeros"),
        ("text", TEXT.repeat(30).into_bytes(), "UTF-8 text"),
        ("Chinese", "时来天地皆同力，运去英雄不自由。".repeat(60).into_bytes(), "UTF-8 text"),
        ("Latin-1", b"caf\xe9, na\xefve, ma\xf1ana, d\xe9j\xe0 vu. ".repeat(60), "8-bit encoding"),
        ("UTF-16", [&[0xff, 0xfe], &bytes(&bytes_only, 2)[..]].concat(), "UTF-16"),
        ("HTML", b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>".to_vec(), "an HTML page"),
        (
            "git-lfs",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n".to_vec(),
            "git lfs pull",
        ),
        ("JSON", b"{\"text\": \"one\"}\n".repeat(50), "UTF-8 text"),
        ("decimal numbers", b"17 4 50256 11\n".repeat(50), "UTF-8 text"),
        ("safetensors", [safetensors.concat(), vec![0; 40]].concat(), "safetensors"),
        ("zip", with_magic(b"PK\x03\x04"), "a zip archive"),
        ("gzip", with_magic(b"\x1f\x8b\x08\0"), "gzip"),
        ("zstd", with_magic(b"\x28\xb5\x2f\xfd"), "zstd"),
        ("bzip2", with_magic(b"BZh91AY&SY"), "bzip2"),
        ("NumPy", with_magic(b"\x93NUMPY\x01\0"), "a NumPy array"),
        ("pickle", with_magic(b"\x80\x04\x95\x10\0\0\0\0\0\0"), "a Python pickle"),
        (
            "PyTorch's old checkpoint",
            with_magic(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"),
            "a Python pickle",
        ),
        ("Parquet", with_magic(b"PAR1"), "a Parquet file"),
        ("Arrow", with_magic(b"ARROW1\0\0"), "an Arrow file"),
        ("GGUF", with_magic(b"GGUF"), "a GGUF model"),
        ("llm.c's model", with_magic(&20_240_326u32.to_le_bytes()), "a model of llm.c"),
        ("an unknown header of llm.c", llm_c, "unknown magic number 777"),
        ("an own file with a damaged byte", with_magic(b"PHXTOK\x01\0"), "first bytes are damaged"),
        ("noise", noise.clone(), "compressed or encrypted"),
    ]
}

#[test]
fn other_files_are_refused_with_what_they_look_like() {
    let at = folder();
    for (kind, bytes, words) in wrong() {
        let path = write(at.path().join("data.bin"), bytes);
        let found = TokenFile::open(&path).and_then(|file| file.check_look());
        let error = found.expect_err(kind).to_string();
        assert!(error.contains(words) && error.contains("data.bin"), "{kind}: {error}");
    }
    for (kind, given, bytes, words) in [
        ("i64 as u32", TokenType::U32, bytes(&ids(500, 50_257), 8), "data.token_type = \"i64\""),
        ("u16 as u32", TokenType::U32, bytes(&ids(5000, 50_257), 2), "as 16-bit ids they go up to"),
        ("u16 as i64", TokenType::I64, bytes(&ids(5000, 50_257), 2), "no tokenizer has so many"),
        ("u16 as u8", TokenType::U8, bytes(&ids(5000, 50_257), 2), "ids of 16 bits or more"),
        ("u16 of bytes as u8", TokenType::U8, bytes(&ids(500, 65), 2), "ids of 16 bits or more"),
        ("text as u8", TokenType::U8, TEXT.repeat(5).into_bytes(), "UTF-8 text"),
        ("text as u32", TokenType::U32, TEXT.repeat(4).into_bytes(), "UTF-8 text"),
        ("zeros as u32", TokenType::U32, vec![0; 400], "one id only"),
    ] {
        let path = write(at.path().join("ids.dat"), bytes);
        let found = TokenFile::open_as(&path, given).and_then(|file| file.check_look());
        let error = found.expect_err(kind).to_string();
        assert!(error.contains(words) && error.contains("ids.dat"), "{kind}: {error}");
    }
}

#[test]
fn half_a_megatron_pair_is_named() {
    let at = folder();
    let right = bytes(&ids(500, 50_257), 2);
    let lone = TokenFile::open(&write(at.path().join("my_text_document.bin"), &right)).unwrap();
    assert_says(
        lone.check_look(),
        &["my_text_document.bin", "Megatron pair", "my_text_document.idx is missing"],
    );
    for damaged in [&b""[..], b"TNTIDX\0\0", b"MMIDIDX"] {
        let file = TokenFile::open(&write(at.path().join("m.bin"), &right)).unwrap();
        write(at.path().join("m.idx"), damaged);
        assert_says(file.check_look(), &["m.bin", "m.idx, which is not a Megatron index"]);
    }
}
