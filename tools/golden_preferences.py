"""Golden values of losses of preferences as TRL computes them, the oracle of crates/train/tests/preferences.rs.

How to run it, from the root of the repository and in an environment outside it:

    python3 -m venv ../golden && ../golden/bin/pip install torch transformers trl safetensors
    ../golden/bin/python tools/golden_preferences.py

It writes crates/models/tests/golden/preferences/ (one thread, fixed seeds); the model is the `llama` of golden_decoders.py:

    data.safetensors      20 steps of four pairs: tokens [20, 8, 17] i32, chosen and rejected answers in turn, -1 - token where it is no
                          target; labels [20, 4] of KTO; references [20, 8], the answers' log-probabilities before the first step
    <kind>.safetensors    20 steps of AdamW as golden_gpt2.py says: losses [20], grad_norms [20], rewards [20, 3] (chosen, rejected, accuracy),
                          final.<name> of some parameters, in double precision, stored as f32; error.<name> [1] of each, the greatest error
                          of PyTorch in f32

The losses of dpo, dpo-norm, robust, ipo and kto are those of TRL's trainers, whose `_compute_loss` gets log-probabilities in double. Those of
orpo and simpo, which TRL rounds to f32, are its formulas in double, and are compared with it. ORPO's loss of the chosen answer is the mean over
its tokens, as in the paper; TRL takes the mean over all tokens of the batch, with those of prompts.
"""

import copy
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from golden_decoders import SEQ, Rotary
from model_goldens import MAX_NORM, adamw, save, tell_sizes

GOLDEN = Path(__file__).resolve().parent.parent / "crates" / "models" / "tests" / "golden"
BUDGET_BYTES = 1 << 17  # what the repository carries of these
STEPS, PAIRS = 20, 4
BETA, SMOOTHING, GAMMA, WEIGHTS = 0.3, 0.1, 0.4, (1.0, 0.6)
KINDS = ["dpo", "robust", "dpo-norm", "ipo", "orpo", "simpo", "kto"]
FINAL = ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"]


def data(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens [20, 8, 17], which of them are targets, labels [20, 4]"""
    random = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, vocab, (STEPS, 2 * PAIRS, SEQ + 1), generator=random)
    is_target = torch.zeros(tokens.shape, dtype=torch.bool)
    for step in range(STEPS):
        for pair in range(PAIRS):
            prompt = int(torch.randint(1, 6, (), generator=random))
            tokens[step, 2 * pair + 1, :prompt] = tokens[step, 2 * pair, :prompt]
            for row in (2 * pair, 2 * pair + 1):
                end = prompt + int(torch.randint(1, SEQ + 2 - prompt, (), generator=random))
                is_target[step, row, prompt:end] = True
    labels = torch.rand((STEPS, PAIRS), generator=random) < 0.6
    labels[:, 0], labels[:, 1] = True, False
    return tokens, is_target, labels


def token_log_probabilities(model, tokens, is_target):
    """[rows, seq], 0 where there is no target"""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    each = torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None])[..., 0]
    return each * is_target[:, 1:]


def of_trl(trainer, kind: str):
    """What a trainer's `_compute_loss` reads of itself"""
    same = lambda x: x  # noqa: E731
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    known = {"dpo": "sigmoid", "dpo-norm": "sigmoid_norm"}.get(kind, kind)
    fields = dict(
        accelerator=accelerator, model=SimpleNamespace(training=True), aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=[known], loss_weights=[1.0], loss_type=known, beta=BETA, label_smoothing=SMOOTHING,
        use_weighting=False, desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1], calculate_KL=True, alpha=0.0, simpo_gamma=GAMMA,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )
    own = SimpleNamespace(**fields)
    own._compute_kl_logps = lambda model, batch: batch["kl_logps"]
    return own, lambda *args: trainer._compute_loss(own, *args)


def answered(log_probabilities):
    """The outputs of a model with TRL's fused head"""
    zeros = torch.zeros_like(log_probabilities.detach())
    return lambda **_: SimpleNamespace(log_probs=log_probabilities, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def step_loss(kind: str, each, is_target, references, labels):
    """Loss, and (chosen, rejected, accuracy), from log-probabilities of tokens [2 pairs, seq]"""
    targets = is_target[:, 1:]
    sums, counts = each.sum(-1), targets.sum(-1)
    if kind == "kto":
        own, compute = of_trl(KTOTrainer, kind)
        batch = {"input_ids": is_target[0::2].long(), "completion_mask": is_target[0::2].long(), "label": labels}
        batch |= {"attention_mask": batch["input_ids"], "ref_logps": references[0::2], "ref_KL_logps": references[1::2]}
        batch["kl_logps"] = sums[1::2].detach()
        loss = compute(answered(each[0::2]), batch, False)
        kl = (sums[1::2] - references[1::2]).mean().clamp(min=0)
        rewards = BETA * (sums - references)[0::2].detach()
        right = (torch.where(labels, 1.0, -1.0) * (rewards - BETA * kl.detach()) > 0).to(rewards.dtype).mean()
        mean = lambda of: rewards[of].sum() / of.sum()  # noqa: E731
        return loss, (mean(labels), mean(~labels), right)
    if kind in ("orpo", "simpo"):
        chosen, rejected = (sums / counts)[0::2], (sums / counts)[1::2]
        own, _ = of_trl(None, kind)
        if kind == "orpo":
            odds = (chosen - rejected) - (torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected)))
            ratio, nll = BETA * F.logsigmoid(odds), -chosen.mean()
            theirs = nll - ORPOTrainer.odds_ratio_loss(own, chosen, rejected)[0].mean()
            loss = nll - ratio.mean()
        else:
            margin = BETA * (chosen - rejected) - GAMMA
            loss = (-(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)).mean()
            theirs = CPOTrainer.cpo_loss(own, chosen, rejected)[0].mean()
        assert abs(loss.item() - theirs.item()) < 2e-6, (kind, loss, theirs)
        rewards = (BETA * chosen.detach(), BETA * rejected.detach())
    else:
        own, compute = of_trl(DPOTrainer, kind)
        both = lambda x: torch.cat([x[0::2], x[1::2]])  # noqa: E731
        inputs = {"input_ids": both(is_target.long()), "completion_mask": both(is_target.long())}
        inputs |= {"attention_mask": inputs["input_ids"], "ref_chosen_logps": references[0::2], "ref_rejected_logps": references[1::2]}
        loss = compute(answered(both(each)), inputs, False)
        rewards = tuple(BETA * (sums - references).detach()[first::2] for first in (0, 1))
        ours = [rewards[0].mean().item(), rewards[1].mean().item(), (rewards[0] > rewards[1]).double().mean().item()]
        names = ["rewards/chosen", "rewards/rejected", "rewards/accuracies"]
        assert all(abs(a - own._metrics["train"][name][-1]) < 1e-5 for a, name in zip(ours, names)), kind
    return loss, (rewards[0].mean(), rewards[1].mean(), (rewards[0] > rewards[1]).to(rewards[0].dtype).mean())


def run(kind: str, model, tokens, is_target, references, labels) -> dict[str, torch.Tensor]:
    optimizer, found = adamw(model), defaultdict(list)
    for step in range(STEPS):
        optimizer.zero_grad()
        each = token_log_probabilities(model, tokens[step], is_target[step])
        loss, rewards = step_loss(kind, each, is_target[step], references[step].to(each.dtype), labels[step])
        loss.backward()
        found["grad_norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).detach())
        optimizer.step()
        found["losses"].append(loss.detach())
        found["rewards"].append(torch.stack(rewards))
    named = dict(model.named_parameters())
    return {k: torch.stack(v) for k, v in found.items()} | {f"final.{name}": named[name].detach().clone() for name in FINAL}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "decoders/llama", attn_implementation="eager", dtype=torch.float32)
    model.model.rotary_emb = Rotary(model.config, model.model.rotary_emb)
    model = model.train()
    tokens, is_target, labels = data(model.config.vocab_size)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        references = [token_log_probabilities(exact, *step).sum(-1) for step in zip(tokens, is_target)]
    references = torch.stack(references)
    folder = GOLDEN / "preferences"
    folder.mkdir(parents=True, exist_ok=True)
    stored = torch.where(is_target, tokens, -1 - tokens).int()
    save(folder / "data.safetensors", {"tokens": stored, "labels": labels.int(), "references": references.float()})
    # As f32, as a run stores them.
    references = references.float().double()
    for kind in KINDS:
        both = [run(kind, copy.deepcopy(of), tokens, is_target, references, labels) for of in (model, exact)]
        f32, f64 = both
        errors = {f"error.{name}": (f32[name] - t).abs().max().float().reshape(1) for name, t in f64.items()}
        save(folder / f"{kind}.safetensors", {name: t.float() for name, t in f64.items()} | errors)
        losses, error = f64["losses"], errors["error.losses"].item()
        print(f"{kind}: losses {losses[0].item():.6f} to {losses[-1].item():.6f}; f32 from double: {error:.1e}")
    tell_sizes(set(folder.glob("*.safetensors")), BUDGET_BYTES)


if __name__ == "__main__":
    main()
