//! Documents that files and folders become, and tokens that documents become.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::{
    Corpus, CorpusSpec, Progress, TokenFile, Tokenizer, Tokens, tokenize_to_file, tokenize_to_memory,
};

use crate::{assert_says, corpus, folder, names, tolerant, write};

fn all(tokens: &Tokens) -> Vec<u32> {
    let mut ids = vec![0; tokens.len()];
    tokens.read(0, &mut ids).unwrap();
    ids
}

fn relative(corpus: &Corpus, root: &Path) -> Vec<String> {
    let name = |path: &PathBuf| path.strip_prefix(root).unwrap().display().to_string();
    corpus.documents().iter().map(|document| name(&document.path)).collect()
}

fn tree() -> tempfile::TempDir {
    let at = folder();
    let files: [(&str, &[u8]); 14] = [
        ("b.rs", b"b"),
        ("a.md", b"aa"),
        ("Z.MD", b"zzz"),
        ("sub/deep/c.toml", b"cccc"),
        ("sub/d.rs", b"ddddd"),
        ("sub.rs", b"eeeeee"),
        (".hidden", b"no"),
        (".git/config.toml", b"no"),
        ("target/debug/build.rs", b"no"),
        ("target/.rustc_info.json", b"no"),
        ("source/target/t.rs", b"yes"),
        ("binary.rs", b"a\0b"),
        ("latin1.md", b"caf\xe9"),
        ("empty.rs", b""),
    ];
    for (name, content) in files {
        write(at.path().join(name), content);
    }
    at
}

#[test]
fn a_folder_is_walked_in_order_and_what_is_not_read_is_said() {
    let at = tree();
    let found = corpus(&[at.path()]).unwrap();
    let expected = ["Z.MD", "a.md", "b.rs", "source/target/t.rs", "sub/d.rs", "sub/deep/c.toml", "sub.rs"];
    assert_eq!(relative(&found, at.path()), expected);
    assert_eq!((found.bytes(), found.findings().files, found.findings().documents), (24, 7, 7));
    let notes = found.findings().notes().join("\n").replace(&format!("{}/", at.path().display()), "");
    let expected = "data: skipped 2 of 9 files: 1 x binary data (text has no zero bytes: leave it out, or list its extension \
        in data.plain to read it nevertheless): binary.rs; 1 x text in another encoding than UTF-8, as Latin-1 or Windows-1252 \
        (convert it: `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`): latin1.md\n\
        data: left out 2 x hidden file or folder: .git, .hidden; 1 x empty file: empty.rs; 1 x build or cache folder (it has \
        .rustc_info.json or CACHEDIR.TAG): target";
    assert_eq!(notes, expected);
}

/// Every format that is told by its content, with what must be said of it.
fn formats() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let utf16 = |text: &str, swap: bool| -> Vec<u8> {
        let bytes = |unit: u16| if swap { unit.to_be_bytes() } else { unit.to_le_bytes() };
        text.encode_utf16().flat_map(bytes).collect()
    };
    let utf32 = |text: &str| -> Vec<u8> { text.chars().flat_map(|c| u32::from(c).to_le_bytes()).collect() };
    let text = "A text, of some length.\nAnd naïve words.\n";
    let ids = |bytes: usize| (0..200u64).flat_map(|id| (id % 65).to_le_bytes()[..bytes].to_vec()).collect();
    let safetensors = [&16u64.to_le_bytes()[..], b"{\"__metadata__\":{}}"].concat();
    vec![
        ("text.gz", b"\x1f\x8b\x08\0rest".to_vec(), "gunzip"),
        ("gzip named.txt", b"\x1f\x8b\x08\0rest".to_vec(), "gzip"),
        ("a.docx", b"PK\x03\x04rest".to_vec(), "zip archive"),
        ("a.zst", b"\x28\xb5\x2f\xfdrest".to_vec(), "unzstd"),
        ("a.parquet", b"PAR1rest".to_vec(), "Parquet"),
        ("a.arrow", b"ARROW1\0\0rest".to_vec(), "Arrow"),
        ("a.pdf", b"%PDF-1.7\nrest".to_vec(), "PDF"),
        ("a.png", b"\x89PNG\r\n\x1a\nrest".to_vec(), "PNG"),
        ("a.tar", [vec![b'a'; 257], b"ustar\0".to_vec()].concat(), "tar archive"),
        ("model.safetensors", safetensors, "safetensors"),
        ("a.pkl", b"\x80\x04\x95\x10\0\0".to_vec(), "pickle"),
        ("old.pkl", b"(lp0\nS'a'\np1\na.".to_vec(), "pickle"),
        ("tokens.txt", b"PHXTOK\0\0rest".to_vec(), "data.tokens"),
        ("gpt2.txt", [&20_240_520u32.to_le_bytes()[..], &[0; 1020]].concat(), "llm.c"),
        ("nano.bin", ids(2), "data.tokens"),
        ("wide.bin", ids(4), "data.tokens"),
        ("longs.bin", ids(8), "data.tokens"),
        ("scripts.bin", (0..500u32).flat_map(|i| (0x4e00 + i * 37).to_le_bytes()).collect(), "data.tokens"),
        ("le.txt", utf16(text, false), "UTF-16LE"),
        ("be.txt", utf16(text, true), "UTF-16BE"),
        ("marked.txt", utf16(&format!("\u{feff}{text}"), false), "UTF-16 "),
        ("utf32.txt", utf32(text), "UTF-32"),
        ("marked32.txt", utf32(&format!("\u{feff}{text}")), "UTF-32"),
        ("latin1.txt", b"caf\xe9 au lait".to_vec(), "WINDOWS-1252"),
        (
            "pointer.txt",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n".to_vec(),
            "git lfs pull",
        ),
        ("annexed.txt", b"/annex/objects/SHA256E-s1--0.txt\n".to_vec(), "git annex get"),
        ("table.csv", b"text,label\nhello,1\n".to_vec(), "pandas"),
        ("table.tsv", b"text\tlabel\nhello\t1\n".to_vec(), "data.plain"),
    ]
}

#[test]
fn other_formats_are_told_by_their_content_and_refused_by_name() {
    let at = folder();
    let all = formats();
    for (name, content, words) in &all {
        let path = write(at.path().join(name), content);
        assert_says(corpus(&[&path]), &[name, words]);
    }
    assert_says(
        corpus(&[at.path()]),
        &["no text found", &format!("skipped {0} of {0} files", all.len()), "gunzip"],
    );
    // More bytes skipped than read.
    let text = write(at.path().join("README"), "read me");
    assert_says(corpus(&[at.path()]), &["bytes", "at most 50 %", "data.max_skipped = 0.99", "gunzip"]);
    let found = tolerant(&[at.path()]).unwrap();
    assert_eq!(found.documents()[0].path, text);
    let notes = found.findings().notes().join("\n");
    for (_, _, words) in &all {
        assert!(notes.contains(words), "{words}: {notes}");
    }
    write(at.path().join("README"), "read me ".repeat(2000));
    assert_eq!(corpus(&[at.path()]).unwrap().findings().skipped_files.count(), all.len() as u64);
}

#[test]
fn text_that_begins_like_the_name_of_a_format_is_text() {
    let at = folder();
    for text in ["ORCHESTRA of nine.", "BZhang wrote it.", "ggml is a library."] {
        let found = corpus(&[&write(at.path().join("words.txt"), text)]).expect(text);
        assert_eq!(found.documents()[0].bytes, text.len() as u64, "{text}");
    }
}

#[test]
fn what_is_read_otherwise_than_written_or_twice_is_said() {
    let at = folder();
    let text = |name: &str, content: &[u8]| write(at.path().join("in").join(name), content);
    text("a.txt", b"\xef\xbb\xbfmarked");
    text("b.txt", b"line\r\nline\r\n");
    text("c.txt", b"the same");
    text("d.txt", b"the same");
    text("page.txt", b"\n<!DOCTYPE html><p>404");
    text("table.txt", b"a\t1\nb\t2\nc\t3\nd\t4\n");
    std::os::unix::fs::symlink("a.txt", at.path().join("in/z.txt")).unwrap();
    std::os::unix::fs::symlink("gone.txt", at.path().join("in/y.txt")).unwrap();
    let found = tolerant(&[&at.path().join("in"), &at.path().join("in/c.txt")]).unwrap();
    let notes = found.findings().notes().join("\n").replace(&format!("{}/in/", at.path().display()), "");
    for words in [
        "skipped 1 of 9 files: 1 x link to nothing (fetch or restore what it points to): y.txt",
        "2 x byte order mark, dropped: a.txt, z.txt",
        "1 x CRLF line ends, kept as they are: b.txt",
        "2 x the same file again (named or linked twice), read once more: z.txt = a.txt, c.txt = c.txt",
        "1 x copy of another file, read too: d.txt = c.txt",
        "1 x looks like an HTML page, read as it is written: page.txt",
        "1 x looks like a table of separated values, read as it is written: table.txt",
    ] {
        assert!(notes.contains(words), "{words}: {notes}");
    }
    assert_eq!(found.bytes(), 6 * 2 + 12 + 3 * 8 + 22 + 16);
}

#[test]
fn extensions_choose_inside_folders_only() {
    let at = tree();
    let table: [(&[&str], &[&str]); 3] = [
        (&["rs"], &["b.rs", "source/target/t.rs", "sub/d.rs", "sub.rs", "a.md"]),
        (&[".md", "TOML"], &["Z.MD", "a.md", "sub/deep/c.toml", "a.md"]),
        (
            &[],
            &["Z.MD", "a.md", "b.rs", "source/target/t.rs", "sub/d.rs", "sub/deep/c.toml", "sub.rs", "a.md"],
        ),
    ];
    for (extensions, expected) in table {
        let paths = vec![at.path().to_path_buf(), at.path().join("a.md")];
        let extensions = extensions.iter().map(|text| text.to_string()).collect();
        let found = Corpus::open(&CorpusSpec { paths, extensions, ..CorpusSpec::default() }).unwrap();
        assert_eq!(relative(&found, at.path()), expected);
    }
}

#[test]
fn links_are_followed_and_no_folder_is_read_twice() {
    use std::os::unix::fs::symlink;
    let at = folder();
    write(at.path().join("real/a.txt"), "a");
    write(at.path().join("elsewhere/c.txt"), "c");
    symlink(at.path().join("real"), at.path().join("real/loop")).unwrap();
    symlink(at.path().join("elsewhere"), at.path().join("real/linked")).unwrap();
    symlink(at.path().join("elsewhere"), at.path().join("real/linked again")).unwrap();
    symlink(at.path().join("real/a.txt"), at.path().join("real/b.txt")).unwrap();
    symlink(at.path().join("real"), at.path().join("named")).unwrap();
    for root in ["real", "named"] {
        let found = corpus(&[&at.path().join(root)]).unwrap();
        let expected = ["a.txt", "b.txt", "linked/c.txt"].map(|name| format!("{root}/{name}"));
        assert_eq!(relative(&found, at.path()), expected);
        let left_out = "2 x folder that was read already by another name";
        assert!(found.findings().notes()[0].contains(left_out), "{:?}", found.findings().notes());
    }
}

#[test]
fn bad_paths() {
    let at = tree();
    let path = |name: &str| at.path().join(name);
    assert_says(corpus(&[&path("nothing.txt")]), &["no such file", "nothing.txt"]);
    assert_says(corpus(&[&path("latin1.md")]), &["latin1.md is not UTF-8", "byte 3"]);
    assert_says(corpus(&[&path("empty.rs")]), &["no text found", "empty.rs", "1 x empty file"]);
    assert_says(corpus(&[Path::new("/dev/null")]), &["/dev/null", "neither a file nor a folder"]);
    assert_says(corpus(&[]), &["no text found", "an empty list of paths"]);
    assert_says(corpus(&[&path("b.rs"), &path("gone")]), &["gone"]);
    fs::remove_file(path("b.rs")).unwrap();
    let extensions = vec!["py".to_string()];
    let spec = CorpusSpec { paths: vec![path("target")], extensions, ..CorpusSpec::default() };
    assert_says(Corpus::open(&spec), &["no text found", "target", "ends in py"]);
}

#[test]
fn documents_are_joined_in_order_with_separators_between() {
    let at = folder();
    write(at.path().join("1.txt"), "Hello");
    write(at.path().join("2.txt"), " world");
    write(at.path().join("3.txt"), "Hello");
    let found = corpus(&[at.path()]).unwrap();
    let table = [
        (Tokenizer::gpt2(), vec![15496, 50256, 995, 50256, 15496]),
        (Tokenizer::byte(), "Hello worldHello".bytes().map(u32::from).collect()),
        (Tokenizer::char_of("Helo wrd"), vec![1, 3, 4, 4, 5, 0, 7, 5, 6, 4, 2, 1, 3, 4, 4, 5]),
    ];
    for (tokenizer, expected) in table {
        let mut seen = Vec::new();
        let tokens = tokenize_to_memory(&found, &tokenizer, 2, &mut |progress| seen.push(progress)).unwrap();
        assert_eq!(all(&tokens), expected);
        assert_eq!(tokens.vocab_size(), Some(tokenizer.vocab_size()));
        let end = Progress { documents: 3, bytes: 16, of: 16, tokens: expected.len() as u64 };
        // A machine that is busy may report in between.
        assert_eq!(seen.last(), Some(&end));

        let file = at.path().join("out/tokens.bin");
        let written = tokenize_to_file(&found, &tokenizer, &file, 2, &mut |_| {}).unwrap();
        assert_eq!((written.documents, written.tokens), (3, expected.len() as u64));
        assert_eq!(written.bytes, fs::metadata(&file).unwrap().len());
        assert_eq!(names(file.parent().unwrap()), ["tokens.bin"]);
        let opened = TokenFile::open(&file).unwrap();
        assert_eq!(opened.tokenizer().unwrap().unwrap().to_json(), tokenizer.to_json());
        assert_eq!(all(&Tokens::open(&file).unwrap()), expected);
        fs::remove_dir_all(at.path().join("out")).unwrap();
    }
}

#[test]
fn large_documents_do_not_depend_on_blocks_or_threads() {
    let at = folder();
    // Lines of odd lengths, with characters of two to four bytes across block borders.
    let line = "word 漢字 🙂 and  é, 12345 it's\n\n";
    let text: String = (0..50_000).map(|n| format!("{n}{line}")).collect();
    assert!(text.len() > 2 << 20);
    let file = write(at.path().join("large.txt"), &text);
    let end = write(at.path().join("other.txt"), "and");
    let found = corpus(&[&file, &end]).unwrap();
    for tokenizer in [Tokenizer::gpt2(), Tokenizer::byte(), Tokenizer::char_of(&text)] {
        let mut expected = tokenizer.encode(&text).unwrap();
        expected.extend(tokenizer.separator());
        expected.extend(tokenizer.encode("and").unwrap());
        for threads in [1, 3] {
            let mut batches = 0;
            let tokens = tokenize_to_memory(&found, &tokenizer, threads, &mut |_| batches += 1).unwrap();
            assert!(all(&tokens) == expected, "{tokenizer:?} with {threads} threads");
            assert!(batches > 1);
        }
    }
}

#[test]
fn a_failed_tokenisation_names_the_document_and_leaves_nothing() {
    let at = folder();
    let text = write(at.path().join("in/text.txt"), "ab".repeat(1 << 20) + "?");
    let found = corpus(&[&text]).unwrap();
    let out = at.path().join("out");
    fs::create_dir(&out).unwrap();
    write(out.join("tokens.bin"), "earlier");
    let failed = tokenize_to_file(&found, &Tokenizer::char_of("ab"), &out.join("tokens.bin"), 2, &mut |_| {});
    assert_says(failed, &["text.txt", "'?'", "byte 2097152 "]);
    assert_eq!(names(&out), ["tokens.bin"]);
    assert_eq!(fs::read(out.join("tokens.bin")).unwrap(), b"earlier");
    let in_a_file = text.join("tokens.bin");
    let failed = tokenize_to_file(&found, &Tokenizer::byte(), &in_a_file, 2, &mut |_| {});
    assert_says(failed, &["cannot write", "tokens.bin"]);
}
