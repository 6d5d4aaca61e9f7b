//! The batch: `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data-parallel ranks.

use anyhow::Result;

use super::{AUTO, is_auto};
use crate::configuration::translation::Draft;
use crate::configuration::translation::value::{Entry, Value};

const NAMES: [&str; 3] =
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
const KEYS: [&str; 3] = ["batch.global", "batch.micro", "parallel.micro_batches"];

/// Trainer's `per_device_train_batch_size`.
const TRAINER: u64 = 8;

/// Derives the batch as they do, and checks the product.
pub(super) fn batch(draft: &mut Draft) -> Result<()> {
    let mut entries: [Option<Entry>; 3] = [None, None, None];
    let mut autos: Vec<Entry> = Vec::new();
    let mut theirs = [None; 3];
    for (at, name) in NAMES.iter().enumerate() {
        match draft.peek(name) {
            Some(entry) if is_auto(entry) || entry.value == Value::Null => autos.extend(draft.take(name)),
            Some(_) => {
                let Some((entry, count)) = draft.take_count(name) else { return Ok(()) };
                (entries[at], theirs[at]) = (Some(entry), Some(count));
            }
            None => {}
        }
    }
    let own =
        KEYS.map(|key| draft.given.value(key).and_then(|value| u64::try_from(value.as_integer()?).ok()));
    if theirs == [None; 3] && (own != [None; 3] || autos.is_empty() && !draft.is_alone) {
        autos.iter().for_each(|entry| draft.unneeded(entry, "the batch is given here"));
        return Ok(());
    }
    let is_of_trainer = !autos.is_empty() || theirs == [None; 3];
    let ranks = ranks(draft, theirs)?;
    let Some([global, micro, count]) = derived(draft, theirs, own, ranks, &entries, is_of_trainer) else {
        return Ok(());
    };
    let product = format!(
        "{global} = {micro} x {count} x {ranks} data-parallel rank{}",
        if ranks == 1 { "" } else { "s" }
    );
    // Their third key follows from the two others here.
    let third = match (&entries, own[2]) {
        (_, Some(_)) => (KEYS[2], count),
        ([None, Some(_), _], None) => (KEYS[0], global),
        _ => (KEYS[1], micro),
    };
    let values = [(KEYS[0], global), (KEYS[1], micro), third];
    let mut is_given = [false; 2];
    for (entry, (key, value)) in entries.iter().zip(values) {
        let Some(entry) = entry else { continue };
        draft.give(entry, key, value as i64, "");
        draft.rows.last_mut().into_iter().for_each(|row| row.why = product.clone());
        (0..2).for_each(|at| is_given[at] |= key == KEYS[at]);
    }
    if !is_given[0] {
        draft.default(NAMES[0], KEYS[0], global as i64, &product);
    }
    if !is_given[1] && own[2].is_none() {
        draft.default(NAMES[1], KEYS[1], micro as i64, &product);
    }
    autos.iter().for_each(|entry| draft.unneeded(entry, &format!("{AUTO}: {product}")));
    Ok(())
}

/// Data-parallel ranks. Those of a configuration that stands alone follow from the three numbers, if it has them.
fn ranks(draft: &mut Draft, theirs: [Option<u64>; 3]) -> Result<u64> {
    let mesh = draft.mesh()?;
    if let ([Some(global), Some(micro), Some(count)], true) =
        (theirs, draft.is_alone && !draft.given.has("parallel.ranks"))
    {
        let ranks = (global / micro.saturating_mul(count)).max(1);
        let world = (ranks as usize).saturating_mul(mesh.tensor * mesh.pipeline);
        let why = "the ranks for which the batch is made";
        draft.default("(ranks)", "parallel.ranks", i64::try_from(world).unwrap_or(i64::MAX), why);
        return Ok(ranks);
    }
    Ok(mesh.data as u64)
}

/// Their three numbers, with those that are missing. Says what is wrong otherwise.
fn derived(
    draft: &mut Draft,
    theirs: [Option<u64>; 3],
    own: [Option<u64>; 3],
    ranks: u64,
    entries: &[Option<Entry>; 3],
    is_of_trainer: bool,
) -> Option<[u64; 3]> {
    let divided = |of: u64, by: u64| of / by.max(1);
    // What they leave open may be given here.
    let open = |at: usize| {
        theirs[at].or(if theirs[0].is_some() && at > 0 && theirs[3 - at].is_some() { None } else { own[at] })
    };
    let [global, micro, count] = [theirs[0], open(1), open(2)];
    let of_trainer = || is_of_trainer.then_some(TRAINER);
    let (micro, count) = match (global, micro, count) {
        (_, Some(micro), Some(count)) => (micro, count),
        (Some(global), Some(micro), None) => (micro, divided(global, micro.saturating_mul(ranks))),
        (Some(global), None, Some(count)) => (divided(global, count.saturating_mul(ranks)), count),
        (Some(global), None, None) => (divided(global, ranks), 1),
        (None, Some(micro), None) => (micro, 1),
        (None, None, count) => {
            let count = count.unwrap_or(1);
            let micro = own[0].map(|global| divided(global, count.saturating_mul(ranks))).or_else(of_trainer);
            let Some(micro) = micro else {
                let line = entries.iter().flatten().map(|entry| entry.line).next().unwrap_or(1);
                let fault = "gradient_accumulation_steps alone does not say the batch: give train_batch_size or \
                             train_micro_batch_size_per_gpu";
                draft.faults.push((line, fault.into()));
                return None;
            };
            (micro, count)
        }
    };
    let product = micro.saturating_mul(count).saturating_mul(ranks);
    let global = global.unwrap_or(product);
    if global != product {
        let lines: Vec<String> = entries.iter().flatten().map(|entry| entry.line.to_string()).collect();
        let one = micro.max(1).saturating_mul(count.max(1));
        let fit = match global.is_multiple_of(one) {
            true => format!("; with {} data-parallel ranks it is", global / one),
            false => String::new(),
        };
        let fault = format!(
            "{} = {global} is not {} x {} x data-parallel ranks = {micro} x {count} x {ranks} = {product} (line {}){fit}",
            NAMES[0],
            NAMES[1],
            NAMES[2],
            lines.join(", ")
        );
        draft.faults.push((entries.iter().flatten().map(|entry| entry.line).next().unwrap_or(1), fault));
        return None;
    }
    Some([global, micro, count])
}
