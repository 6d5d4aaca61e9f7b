//! Token files that are read as one: lists and patterns, borders, and files that do not go together.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::{
    SampleOrder, Sampler, TokenFile, TokenFiles, TokenType, TokenWriter, Tokenizer, Tokens, token_paths,
};

use crate::{assert_says, folder, write};

/// Bare 16-bit ids that count from `first`.
fn counting(path: PathBuf, first: u16, count: u16) -> PathBuf {
    write(path, (first..first + count).flat_map(u16::to_le_bytes).collect::<Vec<_>>())
}

fn own(path: PathBuf, vocab: usize, tokenizer: Option<&Tokenizer>) -> PathBuf {
    let mut writer = TokenWriter::create(&path, vocab).unwrap();
    writer.push(&[1, 2, 3]).unwrap();
    writer.finish(tokenizer).unwrap();
    path
}

fn expand(folder: &Path, entries: &[&str]) -> phalanx_data::Result<Vec<String>> {
    let paths: Vec<PathBuf> = entries.iter().map(|entry| folder.join(entry)).collect();
    let name = |path: PathBuf| path.strip_prefix(folder).unwrap().display().to_string();
    Ok(token_paths(&paths)?.into_iter().map(name).collect())
}

/// Samples of several files are those of the file that `cat` makes of them, wherever it is cut.
#[test]
fn a_border_of_files_changes_no_sample() {
    let at = folder();
    let whole = Tokens::open(&counting(at.path().join("whole.bin"), 100, 1000)).unwrap();
    for cuts in [vec![500], vec![1, 2, 999], vec![16, 33, 40], (1..1000).step_by(7).collect()] {
        let ends = cuts.iter().copied().chain([1000]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let part = |(number, (start, end)): (usize, (u16, u16))| {
            counting(at.path().join(format!("{number:04}.bin")), 100 + start, end - start)
        };
        let paths: Vec<PathBuf> = starts.zip(ends).enumerate().map(part).collect();
        let parts = Tokens::open_all(&paths, TokenType::Auto).unwrap();
        assert_eq!(parts.len(), 1000);
        for (seq, order) in
            [(16, SampleOrder::Shuffled), (7, SampleOrder::Sequential), (999, SampleOrder::Shuffled)]
        {
            let sampler = |tokens: &Tokens| Sampler::new(tokens.clone(), seq, order, 3).unwrap();
            let (one, several) = (sampler(&whole), sampler(&parts));
            assert_eq!(one.samples_per_epoch(), several.samples_per_epoch());
            for position in 0..3 * one.samples_per_epoch() {
                let read = |sampler: &Sampler| {
                    let (mut inputs, mut targets) = (vec![0; seq], vec![0; seq]);
                    sampler.fill(position, &mut inputs, &mut targets).unwrap();
                    (inputs, targets)
                };
                assert_eq!(read(&one), read(&several), "position {position}");
            }
        }
    }
}

#[test]
fn patterns_give_files_in_the_order_of_their_names() {
    let at = folder();
    for name in [
        "b/s_train_10.bin",
        "b/s_train_2.bin",
        "a/s_train_1.bin",
        "a/s_val_0.bin",
        "a/.hidden.bin",
        "x[1].bin",
    ] {
        counting(at.path().join(name), 1, 9);
    }
    counting(at.path().join("m/pair.bin"), 1, 3);
    write(at.path().join("m/pair.idx"), b"MMIDIDX\0\0");
    for (entries, expected) in [
        (vec!["*/s_train_*.bin"], vec!["a/s_train_1.bin", "b/s_train_10.bin", "b/s_train_2.bin"]),
        (vec!["b/s_train_?.bin", "a/*.bin"], vec!["b/s_train_2.bin", "a/s_train_1.bin", "a/s_val_0.bin"]),
        (vec!["b/s_train_2.bin", "a/s_train_1.bin"], vec!["b/s_train_2.bin", "a/s_train_1.bin"]),
        (vec!["x[1].bin"], vec!["x[1].bin"]),
        (vec!["x[[]1].bin"], vec!["x[1].bin"]),
        (vec!["m/*"], vec!["m/pair.bin"]),
        (vec!["missing.bin"], vec!["missing.bin"]),
    ] {
        assert_eq!(expand(at.path(), &entries).unwrap(), expected, "{entries:?}");
    }
    for (entry, words) in [
        ("c/*.bin", ["c/*.bin", "no file has such a name"]),
        ("a/*.npy", ["a/*.npy", "no file has such a name"]),
        ("**/s_train_1.bin", ["**/s_train_1.bin", "** is not understood"]),
    ] {
        assert_says(expand(at.path(), &[entry]), &words);
    }
}

#[test]
fn files_that_do_not_go_together_are_named() {
    let at = folder();
    let path = |name: &str| at.path().join(name);
    let bare = counting(path("bare.bin"), 1, 9);
    let byte = own(path("byte.bin"), 256, Some(&Tokenizer::byte()));
    let char = own(path("char.bin"), 256, Some(&Tokenizer::char_of(&('a'..='z').collect::<String>())));
    let wide = own(path("wide.bin"), 70_000, None);
    let empty = path("empty.bin");
    TokenWriter::create(&empty, 256).unwrap().finish(Some(&Tokenizer::byte())).unwrap();
    let linked = path("linked.bin");
    fs::hard_link(&byte, &linked).unwrap();
    let table: [(&PathBuf, &PathBuf, &[&str]); 6] = [
        (&byte, &bare, &["byte.bin", "bare.bin", "do not go together", "Phalanx's own", "bare ids"]),
        (&byte, &char, &["char.bin", "do not go together", "tokenizer"]),
        (&byte, &wide, &["wide.bin", "do not go together", "u16", "u32", "70000 ids"]),
        (&byte, &byte, &["are one file", "leave one of them out"]),
        (&byte, &linked, &["linked.bin", "are one file"]),
        (&byte, &empty, &["empty.bin", "holds no token"]),
    ];
    for (one, other, words) in table {
        assert_says(TokenFiles::open(&[one.clone(), other.clone()], TokenType::Auto), words);
        assert_says(TokenFiles::open(&[other.clone(), one.clone()], TokenType::Auto), words);
    }
    let open = |path: &PathBuf| TokenFiles::open(std::slice::from_ref(path), TokenType::Auto).unwrap();
    for (one, other, words) in &table[..5] {
        assert_says(open(one).goes_with(&open(other)), words);
    }
    let words = ["data.token_type = \"u32\"", "byte.bin", "Phalanx's own", "ids are u16"];
    assert_says(TokenFile::open_as(&byte, TokenType::U32), &words);
    assert_says(TokenFile::open_as(&bare, TokenType::U32), &["ids of 4 bytes each", "20 bytes", "has 18"]);
}

/// The checksum of several files tells which of them was changed.
#[test]
fn a_changed_file_is_named() {
    let at = folder();
    let paths: Vec<PathBuf> =
        (0..3).map(|n| counting(at.path().join(format!("{n}.bin")), 10 * n, 10)).collect();
    let files = TokenFiles::open(&paths, TokenType::Auto).unwrap();
    let scan = files.scan(40).unwrap();
    assert_eq!((scan.largest, scan.blake3.len()), (29, 3 * 64 + 2));
    assert_says(
        files.scan(15).map(|scan| scan.out_of_range.map_or(Ok(()), Err)).unwrap(),
        &["token 5 of", "1.bin", "id 15"],
    );
    files.check_unchanged(&scan.blake3).unwrap();
    counting(paths[1].clone(), 11, 10);
    assert_says(files.check_unchanged(&scan.blake3), &["1.bin", "does not hold the tokens"]);
    let now = TokenFiles::open(&paths, TokenType::Auto).unwrap().scan(40).unwrap();
    assert_says(files.check_checksums(&now.blake3, &scan.blake3), &["1.bin", "does not hold the tokens"]);
    // An id that appears while the files are in use is named by its file.
    let tokens = Tokens::from(files).limited_to(40);
    counting(paths[1].clone(), 60, 10);
    assert_says(tokens.read(8, &mut [0; 5]), &["token 0 of", "1.bin", "id 60"]);
}
