// The loss of preferences, in f64, from the losses of tokens: as `tensor/src/preference.rs`, in the same order of pairs. Tokens of an answer
// are summed by a block, in another order than on the processor.
#include "numbers.cuh"

#define IGNORED 0xffffffffu
#define SUMS 5
#define THREADS 256

// In the order of `PreferenceKind`.
#define DPO 0
#define ROBUST 1
#define DPO_NORM 2
#define IPO 3
#define ORPO 4
#define SIMPO 5
#define KTO 6

// Of each sequence: its log-probability, its number of tokens, and the loss derived by the first.
struct Answer {
    f64 sum;
    f64 tokens;
    f64 derivative;
};

// A block computes a sequence.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_answers(const f32 *losses, const u32 *targets, u64 seq, Answer *answers, f32 *log_probabilities) {
    __shared__ f64 sums[THREADS];
    __shared__ f64 counts[THREADS];
    const u64 first = (u64)blockIdx.x * seq;
    f64 sum = 0.0, count = 0.0;
    for (u64 at = threadIdx.x; at < seq; at += THREADS) {
        sum += (f64)losses[first + at];
        count += targets[first + at] == IGNORED ? 0.0 : 1.0;
    }
    sums[threadIdx.x] = sum;
    counts[threadIdx.x] = count;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            counts[threadIdx.x] += counts[threadIdx.x + half];
        }
    }
    if (threadIdx.x != 0) return;
    answers[blockIdx.x] = {-sums[0], counts[0], 0.0};
    log_probabilities[blockIdx.x] = (f32)-sums[0];
}

__device__ f64 sigmoid(f64 x) { return 1.0 / (1.0 + exp(-x)); }

__device__ f64 log_sigmoid(f64 x) { return fmin(x, 0.0) - log1p(exp(-fabs(x))); }

// 1 - exp(x), x below 0.
__device__ f64 complement(f64 x) { return fmax(-expm1(fmin(x, -2.2250738585072014e-308)), 2.2250738585072014e-308); }

struct Loss {
    f64 loss;
    f64 by_first;
    f64 by_second;
};

// -log sigmoid(beta x), of which the share `flipped` counts for the other order.
__device__ Loss ordered(f64 beta, f64 x, f64 flipped) {
    const f64 by = -beta * ((1.0 - flipped) * sigmoid(-beta * x) - flipped * sigmoid(beta * x));
    return {-(1.0 - flipped) * log_sigmoid(beta * x) - flipped * log_sigmoid(-beta * x), by, -by};
}

__device__ Loss of_gains(u32 kind, f64 beta, f64 smoothing, f64 gamma, f64 c, f64 r) {
    const f64 h = c - r;
    if (kind == ROBUST) {
        const Loss straight = ordered(beta, h, 0.0), flipped = ordered(beta, -h, 0.0);
        const f64 divisor = 1.0 - 2.0 * smoothing;
        const f64 by = ((1.0 - smoothing) * straight.by_first + smoothing * flipped.by_first) / divisor;
        return {((1.0 - smoothing) * straight.loss - smoothing * flipped.loss) / divisor, by, -by};
    }
    if (kind == IPO) {
        const f64 x = h - 1.0 / (2.0 * beta);
        return {x * x, 2.0 * x, -2.0 * x};
    }
    if (kind == SIMPO) return ordered(beta, h - gamma / beta, smoothing);
    if (kind == ORPO) {
        const f64 log_odds = (c - log(complement(c))) - (r - log(complement(r)));
        const f64 by_odds = -beta * sigmoid(-log_odds);
        return {-c - beta * log_sigmoid(log_odds), by_odds / complement(c) - 1.0, -by_odds / complement(r)};
    }
    return ordered(beta, h, 0.0);
}

// Pairs are few beside logits: one thread computes them, in order.
extern "C" __global__ void __launch_bounds__(1024)
    pair_losses(Answer *answers, const f32 *references, u64 sequences, u32 kind, f32 beta_of, f32 label_smoothing, f32 gamma,
                f32 weight_chosen, f32 weight_rejected, u64 kl_pairs, f32 scale, f32 *sums) {
    if (threadIdx.x != 0) return;
    const bool has_reference = kind != ORPO && kind != SIMPO;
    const bool is_mean = kind != DPO && kind != ROBUST;
    const f64 beta = beta_of;
    f64 totals[SUMS] = {};
    f64 kl = 0.0;
    for (u64 first = 0; first < sequences; first += 2) {
        Answer *pair = answers + first;
        f64 gains[2];
        for (u32 i = 0; i < 2; i++) gains[i] = pair[i].sum - (has_reference ? (f64)references[2 * (first + i)] : 0.0);
        if (kind == KTO) {
            if (first / 2 % kl_pairs == 0) {
                f64 sum = 0.0, count = 0.0;
                for (u64 at = first + 1; at < first + 2 * kl_pairs; at += 2) {
                    if (answers[at].tokens == 0.0) continue;
                    sum += answers[at].sum - (f64)references[2 * at];
                    count += 1.0;
                }
                kl = fmax(sum / fmax(count, 1.0), 0.0);
            }
            if (pair[0].tokens == 0.0) continue;
            const bool is_chosen = references[2 * first + 1] > 0.5f;
            const f64 sign = is_chosen ? 1.0 : -1.0, weight = is_chosen ? weight_chosen : weight_rejected;
            const f64 reward = beta * gains[0], by_label = sign * (reward - beta * kl);
            totals[0] += weight * sigmoid(-by_label);
            totals[is_chosen ? 1 : 2] += reward;
            totals[3] += by_label > 0.0 ? 1.0 : 0.0;
            totals[4] += is_chosen ? 1.0 : 0.0;
            pair[0].derivative = -weight * sign * beta * (sigmoid(by_label) * sigmoid(-by_label));
            continue;
        }
        if (pair[0].tokens == 0.0) continue;
        f64 divisors[2];
        for (u32 i = 0; i < 2; i++) divisors[i] = is_mean ? fmax(pair[i].tokens, 1.0) : 1.0;
        const Loss loss = of_gains(kind, beta, label_smoothing, gamma, gains[0] / divisors[0], gains[1] / divisors[1]);
        const f64 chosen = beta * (has_reference ? gains[0] : gains[0] / divisors[0]);
        const f64 rejected = beta * (has_reference ? gains[1] : gains[1] / divisors[1]);
        totals[0] += loss.loss;
        totals[1] += chosen;
        totals[2] += rejected;
        totals[3] += chosen > rejected ? 1.0 : 0.0;
        totals[4] += 1.0;
        pair[0].derivative = loss.by_first / divisors[0];
        pair[1].derivative = loss.by_second / divisors[1];
    }
    for (u32 i = 0; i < SUMS; i++) sums[i] = (f32)(totals[i] * (f64)scale);
}

// A token's loss is minus the logarithm of its probability. A block writes the factors of a sequence's tokens.
extern "C" __global__ void __launch_bounds__(THREADS) weigh_answers(const Answer *answers, u64 seq, f32 *weights) {
    const f32 weight = (f32)-answers[blockIdx.x].derivative;
    for (u64 at = threadIdx.x; at < seq; at += THREADS) weights[(u64)blockIdx.x * seq + at] = weight;
}
