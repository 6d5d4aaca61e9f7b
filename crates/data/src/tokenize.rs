//! Tokenises a corpus, into memory or a token file, with several threads and in bounded memory.
//!
//! Documents are read in order and cut into pieces at positions where this does not change the tokens. Threads get the
//! pieces in turn, and their results are collected in turn, so the tokens do not depend on the number of threads. Only a
//! `tokenizer.json` must see a whole document. The tokenizer's separator, if it has one, is put between documents.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope};

use crate::corpus::BLOCK_BYTES;
use crate::token_file::{TokenWriter, Written};
use crate::tokens::TokenStore;
use crate::{Corpus, DataError, Result, Tokenizer, Tokens};

/// Progress of a tokenisation, reported about once per megabyte and at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Documents that are completely encoded.
    pub documents: usize,
    /// Bytes of text encoded, of [`Corpus::bytes`].
    pub bytes: u64,
    /// Tokens made, separators among them.
    pub tokens: u64,
}

/// Encodes the corpus into memory: two bytes per token where the vocabulary allows, else four.
///
/// # Errors
/// Those of reading a document, and of [`Tokenizer::encode`] with the document's name.
pub fn tokenize_to_memory(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    threads: usize,
    progress: &mut dyn FnMut(Progress),
) -> Result<Tokens> {
    let mut store = TokenStore::new(tokenizer.vocab_size());
    encode_corpus(corpus, tokenizer, threads, progress, &mut |ids, _| {
        store.extend(ids);
        Ok(())
    })?;
    Ok(store.into_tokens(corpus.origin().to_string()))
}

/// Encodes the corpus into a token file of Phalanx's own format, which also holds the tokenizer. The file appears under
/// its name when it is complete, and replaces an earlier one.
///
/// # Errors
/// Those of [`tokenize_to_memory`] and [`DataError::Write`].
pub fn tokenize_to_file(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    path: &Path,
    threads: usize,
    progress: &mut dyn FnMut(Progress),
) -> Result<Written> {
    let mut writer = TokenWriter::create(path, tokenizer.vocab_size())?;
    encode_corpus(corpus, tokenizer, threads, progress, &mut |ids, ends_document| {
        writer.push(ids)?;
        if ends_document {
            writer.end_document();
        }
        Ok(())
    })?;
    writer.finish(Some(tokenizer))
}

/// What receives the tokens in order: `(ids, ends_document)`.
type Sink<'a> = &'a mut dyn FnMut(&[u32], bool) -> Result<()>;

fn encode_corpus(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    threads: usize,
    progress: &mut dyn FnMut(Progress),
    sink: Sink,
) -> Result<()> {
    thread::scope(|scope| {
        // The threads end when the pipeline, and with it the senders, is dropped, on every return path.
        let start = |_| Worker::start(scope, tokenizer);
        let workers = (0..threads.max(1)).map(start).collect::<Result<Vec<_>>>()?;
        let mut line = Pipeline::new(tokenizer, workers);
        for document in corpus.documents() {
            let mut start = 0;
            document.for_each_part(&|text| tokenizer.last_cut(text), &mut |text, last| {
                let text = text.to_string();
                let length = text.len();
                line.send(TextPiece { text, document: &document.path, start, ends_document: last });
                start = if last { 0 } else { start + length };
                while line.is_full() {
                    line.receive(progress, sink)?;
                }
                Ok(())
            })?;
        }
        while line.in_flight > 0 {
            line.receive(progress, sink)?;
        }
        progress(line.done);
        Ok(())
    })
}

/// A part of a document, to be encoded by itself.
struct TextPiece<'a> {
    text: String,
    document: &'a Path,
    /// The byte of the document at which the text starts.
    start: usize,
    ends_document: bool,
}

impl TextPiece<'_> {
    /// Turns an error of encoding this piece into one about the document.
    fn blame(&self, mut cause: DataError) -> DataError {
        if let DataError::UnknownCharacter { position, .. } = &mut cause {
            *position += self.start;
        }
        DataError::InDocument { path: self.document.to_path_buf(), cause: Box::new(cause) }
    }
}

/// A thread that encodes pieces in the order in which they are sent. It lives for the whole tokenisation, because the
/// pattern engine of `gpt2` warms up in each new thread.
struct Worker<'a> {
    pieces: Sender<TextPiece<'a>>,
    encoded: Receiver<(TextPiece<'a>, Result<Vec<u32>>)>,
}

impl<'a> Worker<'a> {
    fn start<'scope>(scope: &'scope Scope<'scope, '_>, tokenizer: &'a Tokenizer) -> Result<Worker<'a>>
    where
        'a: 'scope,
    {
        let (pieces, inbox) = channel::<TextPiece<'a>>();
        let (outbox, encoded) = channel();
        let encode = move || {
            for piece in inbox {
                let ids = tokenizer.encode(&piece.text);
                if outbox.send((piece, ids)).is_err() {
                    return; // the tokenisation has failed elsewhere
                }
            }
        };
        thread::Builder::new()
            .spawn_scoped(scope, encode)
            .map_err(|error| DataError::Threads { error: error.to_string() })?;
        Ok(Worker { pieces, encoded })
    }
}

/// Piece `n` goes to worker `n % workers` and is received from it in order.
struct Pipeline<'a> {
    tokenizer: &'a Tokenizer,
    workers: Vec<Worker<'a>>,
    /// Pieces received so far, in order.
    received: usize,
    /// Pieces sent and not yet received.
    in_flight: usize,
    bytes_in_flight: usize,
    /// A document has ended, and another may follow.
    owes_separator: bool,
    done: Progress,
    /// The bytes done at the last call of `progress`.
    reported: u64,
}

impl<'a> Pipeline<'a> {
    fn new(tokenizer: &'a Tokenizer, workers: Vec<Worker<'a>>) -> Pipeline<'a> {
        Pipeline {
            tokenizer,
            workers,
            received: 0,
            in_flight: 0,
            bytes_in_flight: 0,
            owes_separator: false,
            done: Progress::default(),
            reported: 0,
        }
    }

    /// Whether enough pieces are in flight to keep every worker busy while one waits to be received.
    fn is_full(&self) -> bool {
        self.bytes_in_flight >= 2 * self.workers.len() * BLOCK_BYTES
    }

    fn send(&mut self, piece: TextPiece<'a>) {
        self.bytes_in_flight += piece.text.len();
        let turn = (self.received + self.in_flight) % self.workers.len();
        self.in_flight += 1;
        self.workers[turn].pieces.send(piece).expect("a worker ends early only by a panic");
    }

    /// Waits for the next piece and passes its tokens to the sink.
    fn receive(&mut self, progress: &mut dyn FnMut(Progress), sink: Sink) -> Result<()> {
        let turn = self.received % self.workers.len();
        let (piece, ids) = self.workers[turn].encoded.recv().expect("a worker ends early only by a panic");
        self.received += 1;
        self.in_flight -= 1;
        self.bytes_in_flight -= piece.text.len();
        let ids = ids.map_err(|cause| piece.blame(cause))?;

        if self.owes_separator
            && let Some(separator) = self.tokenizer.separator()
        {
            sink(&[separator], false)?;
            self.done.tokens += 1;
        }
        self.owes_separator = piece.ends_document;
        sink(&ids, piece.ends_document)?;
        self.done.tokens += ids.len() as u64;
        self.done.bytes += piece.text.len() as u64;
        self.done.documents += usize::from(piece.ends_document);
        if self.done.bytes - self.reported >= BLOCK_BYTES as u64 {
            self.reported = self.done.bytes;
            progress(self.done);
        }
        Ok(())
    }
}
