//! The programs that are compared: which there are, and compiling them on all cores, which takes one core minutes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_tensor::DType;

use super::bench::FLOATS;
use crate::driver::{Context, usable_cards};
use crate::error::Error;
use crate::factory::Options;
use crate::programs::{AttentionForm, HEADS, Program, Source};

/// Forms of attention that are compared.
const GROUPED: AttentionForm =
    AttentionForm { grouped: true, windowed: false, capped: false, documents: false, ahead: false };
const DOCUMENTS: AttentionForm = AttentionForm { documents: true, ..GROUPED };
const ROWS: AttentionForm = AttentionForm { grouped: false, ahead: true, ..DOCUMENTS };
const ALL: AttentionForm = AttentionForm { windowed: true, capped: true, ..GROUPED };

/// The programs of `kernels/table`: all kernels, in the types and sizes that training uses.
pub fn of_tables() -> Vec<Program> {
    let mut all = [Source::ElementwiseF64, Source::NormF64, Source::Preference].map(Program::of_f64).to_vec();
    all.push(Program::sum_of_f64_parts());
    all.extend(FLOATS.map(|element| Program::of(Source::SumParts, element)));
    for element in FLOATS {
        for source in [
            Source::Blocks,
            Source::CrossEntropy,
            Source::Dropout,
            Source::Gated,
            Source::Gelu,
            Source::Images,
            Source::LayerNorm,
            Source::Magnitudes,
            Source::Norm,
            Source::Rotary,
            Source::Tanh,
        ] {
            all.push(Program::of(source, element));
        }
        for source in [Source::AdamW, Source::Bias, Source::Elementwise, Source::Embedding, Source::Sgd] {
            all.push(Program::of(source, element));
        }
        let results = if element == DType::F32 { vec![element] } else { vec![element, DType::F32] };
        for result in results {
            for small in [false, true] {
                all.push(Program { small, ..Program::of(Source::Matmul, element).with_other(result) });
            }
        }
        // The code of f16 is that of bf16 but for the name of the product.
        let sizes: &[usize] = if element == DType::BF16 { &[64, 128] } else { &[64] };
        for size in sizes {
            for source in [Source::Attention, Source::AttentionBackward] {
                let plain = Program::of(source, element).with_head(*size);
                all.extend(plain);
                let with_all = element != DType::F16 && *size == 64;
                let forms = [ALL, DOCUMENTS, ROWS].into_iter().filter(|_| with_all);
                all.extend(forms.flat_map(|form| plain.map(|plain| Program { form, ..plain })));
            }
        }
    }
    all.push(Program { tf32: true, ..Program::of(Source::Matmul, DType::F32) });
    all
}

/// Those of the tables, and what comparisons use beside them: heads of up to 128 elements in each type, and each second type.
fn compared() -> Vec<Program> {
    let mut all = of_tables();
    for element in FLOATS {
        for head in &HEADS[..3] {
            for source in [Source::Attention, Source::AttentionBackward] {
                let plain = Program::of(source, element).with_head(*head as usize);
                all.extend(plain);
                // The comparisons of these forms have small heads.
                let forms = [GROUPED, ALL, DOCUMENTS, ROWS].into_iter().filter(|_| *head == HEADS[0]);
                all.extend(forms.flat_map(|form| plain.map(|plain| Program { form, ..plain })));
            }
        }
        for other in FLOATS {
            for source in [Source::AdamW, Source::Bias, Source::Elementwise, Source::Embedding, Source::Sgd] {
                all.push(Program::of(source, element).with_other(other));
            }
        }
    }
    all.sort_unstable_by_key(|program| (std::cmp::Reverse(program.source.file().1.len()), *program));
    all.dedup();
    all
}

/// Compiles the programs of all comparisons for the first card, on all cores, and keeps them where the options name a folder; the errors
/// of those that do not compile.
///
/// # Errors
/// No usable card or compiler.
pub fn compile(options: &Options) -> Result<Vec<Error>, Error> {
    let context = Arc::new(Context::new(usable_cards()?.swap_remove(0), &Arc::default())?);
    let modules = options.load_modules(&context)?;
    let refused = on_all_cores(&compared(), |program| modules.compile(program).err());
    Ok(refused.into_iter().flatten().collect())
}

/// The results of jobs, on all cores, in their order.
pub fn on_all_cores<J: Sync, R: Send>(jobs: &[J], work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take_all = || {
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < jobs.len());
        std::iter::from_fn(take).map(|at| (at, work(&jobs[at]))).collect::<Vec<_>>()
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(take_all)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("the job does not panic")).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
