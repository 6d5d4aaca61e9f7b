//! Tokenises a corpus, into memory or a token file, with several threads and in bounded memory.
//!
//! Documents are read in order and cut into pieces: at positions where this does not change the tokens, or, for a
//! `tokenizer.json`, into [`windows`](crate::windows) that overlap. Threads get the pieces in turn, and their results are
//! collected in turn, so the tokens do not depend on the number of threads. The tokenizer's separator, if it has one, is
//! put between documents, and what its files say before and behind each. Special tokens that a text spells are counted.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope};

use crate::corpus::BLOCK_BYTES;
use crate::token_file::{TokenWriter, Written};
use crate::tokens::TokenStore;
use crate::windows::{Cutter, Placed, Seam, WINDOW_BYTES, Window};
use crate::{Corpus, DataError, Result, Spelled, Tokenizer, Tokens};

/// Pieces in flight for each worker, however short they are.
const MAX_PIECES: usize = 1 << 10;

/// Progress of a tokenisation, reported about once per megabyte and at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Documents that are completely encoded.
    pub documents: usize,
    /// Bytes of text encoded.
    pub bytes: u64,
    /// [`Corpus::bytes`].
    pub of: u64,
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
    let spelled = encode_corpus(corpus, tokenizer, threads, progress, &mut |ids, ends_document| {
        writer.push(ids)?;
        if ends_document {
            writer.end_document();
        }
        Ok(())
    })?;
    Ok(Written { spelled, ..writer.finish(Some(tokenizer))? })
}

/// What receives the tokens in order: `(ids, ends_document)`.
type Sink<'a> = &'a mut dyn FnMut(&[u32], bool) -> Result<()>;

fn encode_corpus(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    threads: usize,
    progress: &mut dyn FnMut(Progress),
    sink: Sink,
) -> Result<Spelled> {
    thread::scope(|scope| {
        // The threads end when the pipeline, and with it the senders, is dropped, on every return path.
        let start = |_| Worker::start(scope, tokenizer);
        let workers = (0..threads.max(1)).map(start).collect::<Result<Vec<_>>>()?;
        let mut line = Pipeline::new(tokenizer, workers);
        line.done.of = corpus.bytes();
        let mut cutter = Cutter::default();
        for document in corpus.documents() {
            let mut start = 0;
            let mut send = |window: Window| {
                line.send(TextPiece { window, document: &document.path });
                while line.is_full() {
                    line.receive(progress, sink)?;
                }
                Ok(())
            };
            document.for_each_part(&|text| tokenizer.last_cut(text), &mut |text, last| {
                if tokenizer.needs_windows() {
                    return cutter.push(text, last, &mut send);
                }
                let window = Window::alone(text, start, last);
                start = if last { 0 } else { start + text.len() };
                send(window)
            })?;
        }
        while line.in_flight > 0 {
            line.receive(progress, sink)?;
        }
        progress(line.done);
        Ok(line.spelled)
    })
}

/// A part of a document, to be encoded by itself.
struct TextPiece<'a> {
    window: Window,
    document: &'a Path,
}

/// What a piece was encoded to.
enum Encoded {
    /// Ids of the document.
    Ids(Vec<u32>),
    /// Tokens of a window that overlaps with others.
    Placed(Vec<Placed>),
}

impl TextPiece<'_> {
    /// The tokens, and the special tokens that text of no earlier window spells.
    fn encode(&self, tokenizer: &Tokenizer) -> Result<(Encoded, Spelled)> {
        let Window { text, new_bytes, .. } = &self.window;
        let encoded = match self.window.is_alone() || !tokenizer.needs_windows() {
            true => Encoded::Ids(tokenizer.encode(text)?),
            false => Encoded::Placed(tokenizer.encode_window(text)?),
        };
        Ok((encoded, tokenizer.spelled_in(text, text.len() - new_bytes)))
    }

    /// Turns an error of encoding this piece into one about the document.
    fn blame(&self, mut cause: DataError) -> DataError {
        if let DataError::UnknownCharacter { position, .. } = &mut cause {
            *position += self.window.start;
        }
        DataError::InDocument { path: self.document.to_path_buf(), cause: Box::new(cause) }
    }
}

/// A thread that encodes pieces in the order in which they are sent. It lives for the whole tokenisation, because the
/// pattern engine of `gpt2` warms up in each new thread.
struct Worker<'a> {
    pieces: Sender<TextPiece<'a>>,
    encoded: Receiver<(TextPiece<'a>, Result<(Encoded, Spelled)>)>,
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
                let encoded = piece.encode(tokenizer);
                if outbox.send((piece, encoded)).is_err() {
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
    /// Joins windows of a document.
    seam: Seam,
    /// A document has ended, or none has begun.
    between: bool,
    spelled: Spelled,
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
            seam: Seam::default(),
            between: true,
            spelled: Spelled::default(),
            done: Progress::default(),
            reported: 0,
        }
    }

    /// Whether enough pieces are in flight to keep every worker busy while one waits to be received.
    fn is_full(&self) -> bool {
        let piece = if self.tokenizer.needs_windows() { 2 * WINDOW_BYTES } else { BLOCK_BYTES };
        let workers = self.workers.len();
        self.bytes_in_flight >= 2 * workers * piece || self.in_flight >= MAX_PIECES * workers
    }

    fn send(&mut self, piece: TextPiece<'a>) {
        self.bytes_in_flight += piece.window.text.len();
        let turn = (self.received + self.in_flight) % self.workers.len();
        self.in_flight += 1;
        self.workers[turn].pieces.send(piece).expect("a worker ends early only by a panic");
    }

    /// Waits for the next piece and passes its tokens to the sink.
    fn receive(&mut self, progress: &mut dyn FnMut(Progress), sink: Sink) -> Result<()> {
        let turn = self.received % self.workers.len();
        let (piece, encoded) =
            self.workers[turn].encoded.recv().expect("a worker ends early only by a panic");
        self.received += 1;
        self.in_flight -= 1;
        self.bytes_in_flight -= piece.window.text.len();
        let (encoded, spelled) = encoded.map_err(|cause| piece.blame(cause))?;
        let TextPiece { window, document } = piece;
        let (new_bytes, ends_document) = (window.new_bytes, window.ends_document);
        let ids = match encoded {
            Encoded::Ids(ids) => ids,
            Encoded::Placed(tokens) => {
                let encode = |text: &str| self.tokenizer.encode_window(text);
                self.seam.join(document, window, tokens, self.tokenizer.joins_within_words(), &encode)?
            }
        };
        self.spelled.add(spelled);
        self.spelled.add(self.tokenizer.spelled_by_ids(&ids));

        let [begin, end] = self.tokenizer.framing();
        let separator = self.tokenizer.separator();
        if self.between {
            // What ends each document may be the separator itself.
            let separator = separator.filter(|id| self.done.documents > 0 && !end.contains(id));
            let before: Vec<u32> = separator.into_iter().chain(begin.iter().copied()).collect();
            self.put(&before, false, sink)?;
        }
        self.between = ends_document;
        let ends_here = ends_document && end.is_empty();
        self.put(&ids, ends_here, sink)?;
        if ends_document && !ends_here {
            self.put(end, true, sink)?;
        }
        self.done.bytes += new_bytes as u64;
        self.done.documents += usize::from(ends_document);
        if self.done.bytes - self.reported >= BLOCK_BYTES as u64 {
            self.reported = self.done.bytes;
            progress(self.done);
        }
        Ok(())
    }

    fn put(&mut self, ids: &[u32], ends_document: bool, sink: Sink) -> Result<()> {
        self.done.tokens += ids.len() as u64;
        if ids.is_empty() && !ends_document { Ok(()) } else { sink(ids, ends_document) }
    }
}
