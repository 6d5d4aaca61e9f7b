//! Tokenises a corpus, into memory or a token file, with several threads and in bounded memory.
//!
//! Documents are read in order and cut into pieces: at positions where this does not change the tokens, or, for a
//! `tokenizer.json`, into [`windows`](crate::windows) that overlap. Threads get the pieces in turn, and their results are
//! collected in turn, so the tokens do not depend on the number of threads. The tokenizer's separator, if it has one, is
//! put between documents, and what its files say before and behind each. Special tokens that a text spells are counted.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use crate::corpus::BLOCK_BYTES;
use crate::token_file::{TokenWriter, Written};
use crate::tokens::TokenStore;
use crate::windows::{Cutter, Placed, Seam, WINDOW_BYTES, Window};
use crate::{Corpus, DataError, Result, Spelled, Tokenizer, Tokens};

/// Pieces in flight for each worker, however short they are.
const MAX_PIECES: usize = 1 << 10;

/// Time between two looks at a piece that takes long, at which progress is reported.
const TICK: Duration = Duration::from_millis(500);

/// Looks after which a text of so many bytes is given up, which a `tokenizer.json` can make take for ever: 10 s, and 1 s for each kilobyte.
/// Slow ones encode a hundred kilobytes in a second.
fn patience(bytes: usize) -> usize {
    20 + bytes / 500
}

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

/// Receiver of the tokens in order: `(ids, ends_document)`.
type Sink<'a> = &'a mut dyn FnMut(&[u32], bool) -> Result<()>;

fn encode_corpus(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    threads: usize,
    progress: &mut dyn FnMut(Progress),
    sink: Sink,
) -> Result<Spelled> {
    // The threads end when the pipeline, and with it the senders, is dropped, on every return path; one whose piece was given up, when
    // it has encoded it.
    let workers = (0..threads.max(1)).map(|_| Worker::start(tokenizer)).collect::<Result<Vec<_>>>()?;
    let mut line = Pipeline::new(tokenizer, workers);
    line.done.of = corpus.bytes();
    let mut cutter = Cutter::default();
    for document in corpus.documents() {
        let mut start = 0;
        let mut send = |window: Window| {
            line.send(TextPiece { window, document: document.path.clone() });
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
    while !line.in_flight.is_empty() {
        line.receive(progress, sink)?;
    }
    progress(line.done);
    Ok(line.spelled)
}

/// A part of a document, to be encoded by itself.
struct TextPiece {
    window: Window,
    document: PathBuf,
}

/// Result of encoding a piece.
enum Encoded {
    /// Ids of the document.
    Ids(Vec<u32>),
    /// Tokens of a window that overlaps with others.
    Placed(Vec<Placed>),
}

impl TextPiece {
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
        DataError::InDocument { path: self.document.clone(), cause: Box::new(cause) }
    }
}

/// A thread that encodes pieces in the order in which they are sent. It lives for the whole tokenisation, because the
/// pattern engine of `gpt2` warms up in each new thread.
struct Worker {
    pieces: Sender<TextPiece>,
    encoded: Receiver<(TextPiece, Result<(Encoded, Spelled)>)>,
}

impl Worker {
    fn start(tokenizer: &Tokenizer) -> Result<Worker> {
        let (pieces, inbox) = channel::<TextPiece>();
        let (outbox, encoded) = channel();
        let tokenizer = tokenizer.clone();
        spawn(move || {
            for piece in inbox {
                let encoded = piece.encode(&tokenizer);
                if outbox.send((piece, encoded)).is_err() {
                    return; // the tokenisation has failed elsewhere
                }
            }
        })?;
        Ok(Worker { pieces, encoded })
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = thread::Builder::new().spawn(work);
    started.map(drop).map_err(|error| DataError::Threads { error: error.to_string() })
}

/// Waits for what a thread makes of a text of so many bytes, and calls `tick` at each look.
///
/// # Errors
/// [`DataError::Encode`] where it takes too long; the thread goes on.
fn wait<T>(from: &Receiver<T>, bytes: usize, looks: usize, tick: &mut dyn FnMut()) -> Result<T> {
    for _ in 0..looks {
        match from.recv_timeout(TICK) {
            Ok(made) => return Ok(made),
            Err(RecvTimeoutError::Timeout) => tick(),
            Err(RecvTimeoutError::Disconnected) => panic!("a worker ends early only by a panic"),
        }
    }
    let waited = (TICK * looks as u32).as_secs();
    let reason = format!(
        "{bytes} bytes of it take more than {waited} s, as where a pattern of a tokenizer.json is tried in very many ways: use \
         another tokenizer, or leave this text out"
    );
    Err(DataError::Encode { reason })
}

/// The tokens of a window that is made of two others.
fn encode_window(tokenizer: &Tokenizer, text: &str) -> Result<Vec<Placed>> {
    let (outbox, encoded) = channel();
    let (tokenizer, bytes, text) = (tokenizer.clone(), text.len(), text.to_string());
    // Where nobody waits any more, it took too long.
    spawn(move || drop(outbox.send(tokenizer.encode_window(&text))))?;
    wait(&encoded, bytes, patience(bytes), &mut || {})?
}

/// Piece `n` goes to worker `n % workers` and is received from it in order.
struct Pipeline<'a> {
    tokenizer: &'a Tokenizer,
    workers: Vec<Worker>,
    /// Pieces received so far, in order.
    received: usize,
    /// Bytes and document of each piece that was sent and not yet received.
    in_flight: VecDeque<(usize, PathBuf)>,
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
    fn new(tokenizer: &'a Tokenizer, workers: Vec<Worker>) -> Pipeline<'a> {
        Pipeline {
            tokenizer,
            workers,
            received: 0,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            seam: Seam::default(),
            between: true,
            spelled: Spelled::default(),
            done: Progress::default(),
            reported: 0,
        }
    }

    /// Returns whether enough pieces are in flight to keep every worker busy while one waits to be received.
    fn is_full(&self) -> bool {
        let piece = if self.tokenizer.needs_windows() { 2 * WINDOW_BYTES } else { BLOCK_BYTES };
        let workers = self.workers.len();
        self.bytes_in_flight >= 2 * workers * piece || self.in_flight.len() >= MAX_PIECES * workers
    }

    fn send(&mut self, piece: TextPiece) {
        let bytes = piece.window.text.len();
        self.bytes_in_flight += bytes;
        let turn = (self.received + self.in_flight.len()) % self.workers.len();
        self.in_flight.push_back((bytes, piece.document.clone()));
        self.workers[turn].pieces.send(piece).expect("a worker ends early only by a panic");
    }

    /// Waits for the next piece and passes its tokens to the sink.
    fn receive(&mut self, progress: &mut dyn FnMut(Progress), sink: Sink) -> Result<()> {
        let turn = self.received % self.workers.len();
        let (bytes, path) = self.in_flight.pop_front().expect("a piece is in flight");
        let waited = wait(&self.workers[turn].encoded, bytes, patience(bytes), &mut || progress(self.done));
        let (piece, encoded) =
            waited.map_err(|cause| DataError::InDocument { path, cause: Box::new(cause) })?;
        self.received += 1;
        self.bytes_in_flight -= bytes;
        let (encoded, spelled) = encoded.map_err(|cause| piece.blame(cause))?;
        let TextPiece { window, document } = piece;
        let (new_bytes, ends_document) = (window.new_bytes, window.ends_document);
        let ids = match encoded {
            Encoded::Ids(ids) => ids,
            Encoded::Placed(tokens) => {
                let encode = |text: &str| encode_window(self.tokenizer, text);
                self.seam.join(&document, window, tokens, self.tokenizer.joins_within_words(), &encode)?
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_takes_too_long_is_given_up_and_progress_is_reported_meanwhile() {
        let (outbox, never) = channel::<()>();
        let mut ticks = 0;
        let error = wait(&never, 700, 2, &mut || ticks += 1).unwrap_err().to_string();
        assert!(error.contains("700 bytes of it take more than 1 s") && ticks == 2, "{error}, {ticks} ticks");
        outbox.send(()).unwrap();
        wait(&never, 700, 1, &mut || panic!("it is there")).unwrap();
    }
}
