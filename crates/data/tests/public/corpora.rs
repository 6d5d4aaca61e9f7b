//! What of files and folders becomes documents, and documents become tokens.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::{
    Corpus, CorpusSpec, Progress, SkipReason, TokenFile, Tokenizer, Tokens, tokenize_to_file,
    tokenize_to_memory,
};

use crate::{assert_says, corpus, folder, names, write};

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
    let files: [(&str, &[u8]); 12] = [
        ("b.rs", b"b"),
        ("a.md", b"aa"),
        ("Z.MD", b"zzz"),
        ("sub/deep/c.toml", b"cccc"),
        ("sub/d.rs", b"ddddd"),
        ("sub.rs", b"eeeeee"),
        (".hidden", b"no"),
        (".git/config.toml", b"no"),
        ("target/debug/build.rs", b"no"),
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
fn a_folder_is_walked_in_order() {
    let at = tree();
    let found = corpus(&[at.path()]).unwrap();
    let expected = ["Z.MD", "a.md", "b.rs", "sub/d.rs", "sub/deep/c.toml", "sub.rs"];
    assert_eq!(relative(&found, at.path()), expected);
    assert_eq!(found.bytes(), 21);
    let skipped: Vec<(String, SkipReason)> = found
        .skipped()
        .iter()
        .map(|skipped| (skipped.path.file_name().unwrap().to_string_lossy().into_owned(), skipped.reason))
        .collect();
    let expected = [
        ("binary.rs", SkipReason::NotText),
        ("empty.rs", SkipReason::Empty),
        ("latin1.md", SkipReason::NotText),
    ];
    assert_eq!(skipped, expected.map(|(name, reason)| (name.to_string(), reason)));
}

#[test]
fn extensions_choose_inside_folders_only() {
    let at = tree();
    let table: [(&[&str], &[&str]); 3] = [
        (&["rs"], &["b.rs", "sub/d.rs", "sub.rs", "a.md"]),
        (&[".md", "TOML"], &["Z.MD", "a.md", "sub/deep/c.toml", "a.md"]),
        (&[], &["Z.MD", "a.md", "b.rs", "sub/d.rs", "sub/deep/c.toml", "sub.rs", "a.md"]),
    ];
    for (extensions, expected) in table {
        let paths = vec![at.path().to_path_buf(), at.path().join("a.md")];
        let extensions = extensions.iter().map(|text| text.to_string()).collect();
        let found = Corpus::open(&CorpusSpec { paths, extensions, ..CorpusSpec::default() }).unwrap();
        assert_eq!(relative(&found, at.path()), expected);
    }
}

#[cfg(unix)]
#[test]
fn links_to_files_are_followed_and_loops_are_not() {
    use std::os::unix::fs::symlink;
    let at = folder();
    write(at.path().join("real/a.txt"), "a");
    symlink(at.path().join("real"), at.path().join("real/loop")).unwrap();
    symlink(at.path().join("real/a.txt"), at.path().join("real/b.txt")).unwrap();
    symlink(at.path().join("nothing"), at.path().join("real/broken.txt")).unwrap();
    symlink(at.path().join("real"), at.path().join("named")).unwrap();
    assert_eq!(
        relative(&corpus(&[&at.path().join("real")]).unwrap(), at.path()),
        ["real/a.txt", "real/b.txt"]
    );
    // A link that the user names is followed.
    assert_eq!(
        relative(&corpus(&[&at.path().join("named")]).unwrap(), at.path()),
        ["named/a.txt", "named/b.txt"]
    );
}

#[test]
fn bad_paths() {
    let at = tree();
    let path = |name: &str| at.path().join(name);
    assert_says(corpus(&[&path("nothing.txt")]), &["no such file", "nothing.txt"]);
    assert_says(corpus(&[&path("latin1.md")]), &["latin1.md is not UTF-8", "byte 3"]);
    assert_says(corpus(&[&path("empty.rs")]), &["no text found", "empty.rs", "1 empty files"]);
    #[cfg(unix)]
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
        let end = Progress { documents: 3, bytes: 16, tokens: expected.len() as u64 };
        assert_eq!(seen, [end]);

        let file = at.path().join("out/tokens.bin");
        let written = tokenize_to_file(&found, &tokenizer, &file, 2, &mut |_| {}).unwrap();
        assert_eq!((written.documents, written.tokens), (3, expected.len() as u64));
        assert_eq!(written.bytes, fs::metadata(&file).unwrap().len());
        assert_eq!(names(file.parent().unwrap()), ["tokens.bin"]);
        let opened = TokenFile::open(&file).unwrap();
        assert_eq!(opened.tokenizer().unwrap().unwrap().to_json(), tokenizer.to_json());
        assert_eq!(all(&Tokens::from(opened)), expected);
        fs::remove_dir_all(at.path().join("out")).unwrap();
    }
}

#[test]
fn large_documents_do_not_depend_on_blocks_or_threads() {
    let at = folder();
    // Lines of odd lengths, with characters of two to four bytes across block borders.
    let line = "word 漢字 🙂 and  é, 12345 it's\n\n";
    let text: String = (0..80_000).map(|n| format!("{n}{line}")).collect();
    assert!(text.len() > 3 << 20);
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
