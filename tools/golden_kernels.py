"""Golden values of every kernel in every element type, the oracle of crates/cpu/tests/cpu/goldens.

How to run it, from the root of the repository and in an environment outside it:

    python3 -m venv ../golden && ../golden/bin/pip install torch safetensors
    ../golden/bin/python tools/golden_kernels.py

It writes crates/cpu/tests/goldens/<family>.safetensors (one thread, fixed seed). A tensor's name is
`<type>/<case>/<name>`; the type is what the kernel computes in: f32, bf16 or f16. For every case there are

    <name>              an input: numbers of the type (a few, like statistics, f32 or i32), drawn at random
    <name>              an output: what PyTorch gives in f64 from these inputs; stored as f64 where the type is
                        f32, as f32 where it has 16 bits (64 times finer than half a step of the type)
    <name>.tolerance    by how much a right kernel may miss it before it rounds its output, see below; bf16,
                        rounded up
    <name>.pytorch      what PyTorch gives in the type itself, where it can

A test allows half a step of the output's type plus the tolerance. Nothing in a tolerance is fitted to what some
kernel gives; it is the sum of what the contract (crates/tensor/src/kernels.rs) lets happen on the way:

  - Everything is computed in f32. A sum of n products may be off by n roundings of EPS times the sum of
    magnitudes; roundings are as good as independent, so 7 sqrt(n) of them are only passed with a chance of 5e-11
    an element (Hoeffding's bound; Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
    2019). `spread` is the smaller of both.
  - What is stored, or goes into a product of matrices, has the type: `pre` before its GELU; scores of the head, the
    numerators of their softmax and their derivatives; probabilities of attention before `p · v` and `pᵀ · dout`,
    derivatives of its scores before their products, `out` as backward reads it. Each is off by half a step of its
    own, and `through` carries independent errors through a product in the same way.

The table printed at the end says how far PyTorch itself is, and how much of the allowance that is. It is more than
all of it where PyTorch's CPU kernels round what the contract does not let round: layer norm keeps its statistics in the
type, column sums, the rows of an embedding table and the gradient of max pooling are summed in it, GELU has a `1 + tanh` that cancels, and the
log_sum_exp of attention in 16 bits comes from a coarser exponential.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

GOLDENS = Path(__file__).resolve().parent.parent / "crates" / "cpu" / "tests" / "goldens"
BUDGET_BYTES = 1_570_000  # what the repository carries of them
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 2.0**-24  # relative error of one rounding to f32
ROUNDING = {torch.float32: EPS, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the same by type
LEAST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # half a step around zero
DIGITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
SMALLEST = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}  # exponent of the least normal number
F64 = 2.0**-53  # relative error of one rounding of the reference
SIGMA = 7.0


def spread(n):
    """How many of n roundings may point in one direction; a number or a tensor of them."""
    n = torch.as_tensor(n, dtype=torch.float64)
    return torch.minimum(n, SIGMA * n.sqrt())


def sums(n):
    """Relative error of a sum of n products in f32, each with a rounding, and a few around it."""
    return EPS * spread(2 * n + 4)


def rounding(x, dtype):
    """The most by which numbers near `x` move when they are stored."""
    return ROUNDING[dtype] * x.abs() + LEAST[dtype]


def joint(terms, dim):
    """The most by which a sum along `dim` is off, whose terms are off by up to `terms`, independently."""
    return torch.minimum(terms.abs().sum(dim), SIGMA * terms.square().sum(dim).sqrt())


def through(errors, b):
    """The most by which the product of a and b is off: independent `errors` (one or several) in every element of a."""
    errors = errors if isinstance(errors, list) else [errors]
    worst = sum(e.abs() @ b.abs() for e in errors)
    return torch.minimum(worst, SIGMA * sum(e.square() @ b.square() for e in errors).sqrt())


def half_step(x, dtype):
    """Half the distance between numbers of a type around x."""
    exponent = torch.frexp(x.abs().clamp(min=2.0 ** SMALLEST[dtype])).exponent.double() - 1
    return torch.exp2(exponent - DIGITS[dtype])


class Golden:
    """The cases of one family of kernels in one type."""

    rows = {}  # of the table: (family, output, type) -> worst figures of its cases

    def __init__(self, family, type_name, tensors):
        self.family, self.type_name, self.dtype, self.tensors = family, type_name, TYPES[type_name], tensors
        self.prefix = ""

    def case(self, name):
        self.prefix = f"{self.type_name}/{name}/"
        return self

    def put(self, name, t):
        assert self.prefix + name not in self.tensors, self.prefix + name
        self.tensors[self.prefix + name] = t.detach().contiguous().clone()

    def given(self, name, t, dtype=None):
        """Stores an input as the type has it, and gives it back in f64."""
        t = t.to(dtype or self.dtype)
        assert t.isfinite().all()
        self.put(name, t)
        return t.double()

    def wanted(self, name, value, tolerance, own=None, stored=None):
        """Stores an output: f64 value, what it may be off, what PyTorch gives. `stored`: its type, if another."""
        value, stored = value.detach(), stored or self.dtype
        # One more rounding, because it passes through f32 on its way and may be stored here as f32.
        tolerance = (tolerance + (0 if stored == torch.float64 else EPS) * value.abs()).detach()
        assert value.dtype == tolerance.dtype == torch.float64 and value.shape == tolerance.shape, name
        assert value.isfinite().all() and tolerance.isfinite().all(), name
        self.put(name, value if self.dtype == torch.float32 or stored == torch.float64 else value.float())
        self.put(name + ".tolerance", (tolerance * (1 + 2.0**-7)).bfloat16())
        if own is not None:
            self.put(name + ".pytorch", own)
        allowed = tolerance + (0 if stored == torch.float64 else half_step(value, stored))
        self.note(name, value, allowed, own)

    def note(self, name, value, allowed, own):
        """Keeps the worst of the cases for the table, relative to the largest value."""
        largest = value.abs().max().clamp(min=1e-30)
        error = (own.detach().double() - value).abs() if own is not None else None
        figures = [
            (allowed.max() / largest).item(),
            (error.max() / largest).item() if own is not None else float("nan"),
            (error / allowed).max().item() if own is not None else float("nan"),
        ]
        known = Golden.rows.setdefault((self.family, name, self.type_name), [0.0] * 3)
        Golden.rows[self.family, name, self.type_name] = [max(a, b) if b == b else b for a, b in zip(known, figures)]


def leaf(t, dtype):
    return t.detach().to(dtype, copy=True).requires_grad_()


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def gelu_tolerance(x):
    """GELU in f32, at x: a sigmoid of 2u, whose argument is off by a few roundings of 2u.

    PyTorch has `1 + tanh(u)`, which cancels where x is far below zero: in f64 too, hence the second part."""
    two_u = 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    s = torch.sigmoid(two_u)
    return EPS * F.gelu(x, approximate="tanh").abs() * ((4 * two_u.abs() + 2) * (1 - s) + 4) + F64 * x.abs()


def gelu_slope(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)[0]


def gelu_slope_tolerance(x):
    """The derivative `s + x s (1 - s) 2u'` in f32: both terms are off as the sigmoid is, and a few roundings."""
    two_u = 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    s = torch.sigmoid(two_u)
    bend = x * s * (1 - s) * 2 * (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x**2)
    off = EPS * (s * ((4 * two_u.abs() + 2) * (1 - s) + 4) + bend.abs() * (4 * two_u.abs() + 12))
    return off + 4 * F64 * (1 + x**2)


def erf_tail(x):
    """The normal distribution beyond |x|, and by how much a tail in f32 may miss it, over the tail.

    An exponential, of an argument `x^2 / 2` that is off by a few of its own roundings, times a quotient of two
    polynomials of at most 5 steps with terms of one sign, two roundings each, and a few around them."""
    a = x.abs()
    return 0.5 * torch.erfc(a * 0.5**0.5), EPS * (2 * a**2 + 28)


def gelu_erf_tolerance(x):
    """GELU by erf in f32: `max(x, 0) - |x| tail`. PyTorch has `1 + erf`, which cancels: in f64 too."""
    tail, off = erf_tail(x)
    return x.abs() * tail * off + 2 * EPS * F.gelu(x).abs() + F64 * x.abs()


def gelu_erf_slope(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.gelu(x).sum(), x)[0]


def gelu_erf_slope_tolerance(x):
    """The derivative in f32: 1 or 0, and `|x| density - tail`, both off as the tail is."""
    tail, off = erf_tail(x)
    bend = x.abs() * torch.exp(-0.5 * x**2) * (2 * torch.pi) ** -0.5
    return off * (tail + bend) + 2 * EPS * (1 + gelu_erf_slope(x).abs()) + 4 * F64 * (1 + x**2)


def linear(g):
    """a [m, k] · b [k, n]: what linear, its gradients (a or b transposed) and the bias gradient compute.

    product = a · b; pre = product + bias; gelu, gelu_erf = GELU of pre (the latter once); columns [n] = sum of b along k. What is accumulated into
    or added as residual, `before` [m, n], a test adds to `product` itself."""
    for m, k, n in ((13, 37, 23), (29, 53, 37), (5, 1103, 11)):
        g.case(f"{m}x{k}x{n}")
        a, b = g.given("a", normal(m, k)), g.given("b", normal(k, n))
        bias, _ = g.given("bias", normal(n)), g.given("before", normal(m, n))
        own_a, own_b, own_bias = (t.to(g.dtype) for t in (a, b, bias))
        off = sums(k) * (a.abs() @ b.abs())
        g.wanted("product", a @ b, off, own_a @ own_b)
        pre, off = a @ b + bias, off + 2 * EPS * bias.abs()
        own = torch.addmm(own_bias, own_a, own_b)
        g.wanted("pre", pre, off, own)
        # Through GELU goes the error of `pre` as it is stored; its slope bends by at most 1.2.
        pre_off = off + rounding(pre, g.dtype)
        off = gelu_slope(pre).abs() * pre_off + 0.6 * pre_off**2 + gelu_tolerance(pre)
        g.wanted("gelu", F.gelu(pre, approximate="tanh"), off, F.gelu(own, approximate="tanh"))
        if n < 20:
            off = gelu_erf_slope(pre).abs() * pre_off + 0.6 * pre_off**2 + gelu_erf_tolerance(pre)
            g.wanted("gelu_erf", F.gelu(pre), off, F.gelu(own))
        g.wanted("columns", b.sum(0), sums(k) * b.abs().sum(0), own_b.sum(0))


def layer_norm(g):
    """x [rows, hidden] -> y, mean [rows], rstd [rows]; from dy: dx, dgamma, dbeta [hidden]."""
    eps = float(torch.tensor(1e-5, dtype=torch.float32))
    for rows, hidden in ((9, 67), (2, 1103)):
        g.case(f"{rows}x{hidden}")
        x = g.given("x", 2 * normal(rows, hidden) + normal(rows, 1))
        gamma, beta = g.given("gamma", 1 + 0.5 * normal(hidden)), g.given("beta", normal(hidden))
        dy = g.given("dy", normal(rows, hidden))

        def run(dtype):
            leaves = [leaf(t, dtype) for t in (x, gamma, beta)]
            y = F.layer_norm(leaves[0], (hidden,), leaves[1], leaves[2], eps)
            return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

        (y, dx, dgamma, dbeta), own = run(torch.float64), run(g.dtype)
        mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        rstd = (variance + eps).rsqrt()
        normed = (x - mean) * rstd
        mean_off = sums(hidden) * x.abs().mean(1, keepdim=True)
        # An error of the mean enters the variance squared: deviations sum to zero.
        rstd_off = 0.5 * (sums(hidden) + mean_off**2 / variance) + 3 * EPS
        normed_off = rstd * (mean_off + EPS * (x.abs() + mean.abs())) + normed.abs() * (rstd_off + 2 * EPS)
        g.wanted("y", y, gamma.abs() * (normed_off + 2 * EPS * normed.abs()) + 2 * EPS * beta.abs(), own[0])
        g.wanted("mean", mean[:, 0], mean_off[:, 0], stored=torch.float32)
        g.wanted("rstd", rstd[:, 0], (rstd * rstd_off)[:, 0], stored=torch.float32)

        d = dy * gamma
        along = d.abs().mean(1, keepdim=True)
        along_normed = (d * normed).abs().mean(1, keepdim=True)
        parts = d.abs() + along + normed.abs() * along_normed
        off = (rstd_off + sums(hidden) + 4 * EPS) * parts
        off = off + normed_off * (d * normed).mean(1, keepdim=True).abs()
        off = off + normed.abs() * (d.abs() * normed_off).mean(1, keepdim=True)
        g.wanted("dx", dx, rstd * off, own[1])
        off = (dy.abs() * normed_off).sum(0) + sums(rows) * (dy * normed).abs().sum(0)
        g.wanted("dgamma", dgamma, off, own[2])
        g.wanted("dbeta", dbeta, sums(rows) * dy.abs().sum(0), own[3])


def gelu(g):
    """x [11, 53], dy -> y; dx and its sum over rows, db [53]. By erf of the first rows alone."""
    x = 2.5 * normal(11, 53)
    x[0, :12] = torch.tensor([0, -0.0, 1e-6, -1e-6, 2e-7, 30, -30, 9, -9, -5.5, 200, -200], dtype=torch.float64)
    inputs = x, normal(11, 53)
    forms = (11, "tanh", gelu_tolerance, gelu_slope_tolerance), (2, "erf", gelu_erf_tolerance, gelu_erf_slope_tolerance)
    for rows, form, tolerance, slope_tolerance in forms:
        g.case(f"{rows}x53" + (" erf" if form == "erf" else ""))
        x, dy = g.given("x", inputs[0][:rows]), g.given("dy", inputs[1][:rows])

        def run(dtype):
            at = leaf(x, dtype)
            y = F.gelu(at, approximate="none" if form == "erf" else form)
            return y, torch.autograd.grad(y, at, dy.to(dtype))[0]

        (y, dx), own = run(torch.float64), run(g.dtype)
        g.wanted("y", y, tolerance(x), own[0])
        off = dy.abs() * slope_tolerance(x) + 2 * EPS * dx.abs()
        g.wanted("dx", dx, off, own[1])
        g.wanted("db", dx.sum(0), off.sum(0) + sums(rows) * dx.abs().sum(0), own[1].sum(0))


def attention(g):
    """qkv [batch, seq, 3 * heads * size] -> out, log_sum_exp [batch, heads, seq]; from dout: dqkv."""
    shapes = (2, 19, 2, 5, True), (2, 19, 2, 5, False), (1, 131, 1, 5, True), (1, 67, 1, 6, False)
    for batch, seq, heads, size, causal in shapes:
        g.case(f"{batch}x{seq}x{heads}x{size} {'causal' if causal else 'full'}")
        hidden = heads * size
        qkv = g.given("qkv", 1.5 * normal(batch, seq, 3 * hidden))
        dout = g.given("dout", normal(batch, seq, hidden))

        def split(t):
            """[batch, seq, n * hidden] -> [n, batch, heads, seq, size]"""
            return t.reshape(batch, seq, -1, heads, size).permute(2, 0, 3, 1, 4)

        def join(t):
            return t.permute(1, 3, 0, 2, 4).reshape(batch, seq, -1)

        def run(dtype):
            at = leaf(qkv, dtype)
            y = join(F.scaled_dot_product_attention(*split(at), is_causal=causal)[None])
            return y, torch.autograd.grad(y, at, dout.to(dtype))[0]

        (out, dqkv), own = run(torch.float64), run(g.dtype)
        q, k, v = split(qkv)
        scores = q @ k.mT * size**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -torch.inf)
        log_sum_exp = scores.logsumexp(-1)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own_log_sum_exp = flash(*(t.to(g.dtype) for t in (q, k, v)), 0.0, causal)[1]
        offs = attention_tolerances(g.dtype, q, k, v, split(out)[0], split(dout)[0], scores, log_sum_exp)
        g.wanted("out", out, join(offs[0][None]), own[0])
        g.wanted("log_sum_exp", log_sum_exp, offs[1], own_log_sum_exp, stored=torch.float32)
        g.wanted("dqkv", dqkv, join(torch.stack(offs[2:])), own[1])


def attention_tolerances(dtype, q, k, v, out, dout, scores, log_sum_exp):
    """Of out, log_sum_exp, dq, dk, dv; all [batch, heads, seq, size]. See the docstring for what is rounded."""
    seq, size = q.shape[-2:]
    scale = size**-0.5
    p = (scores - log_sum_exp[..., None]).exp()
    seen = scores.isfinite()
    # Relative error of a probability: that of its score, and of the exponential's argument, again at every one of
    # the tiles of 64 keys, where the largest score may change.
    largest = scores.masked_fill(~seen, 0).abs().amax(-1, keepdim=True)
    tiles = -(-seq // 64)
    off = scale * sums(size) * (q.abs() @ k.abs().mT) + EPS * (8 + 4 * largest) * (1 + tiles)
    row = (p * off).sum(-1, keepdim=True) + sums(seq)
    log_sum_exp_off = row[..., 0] + EPS * (4 * log_sum_exp.abs() + 2 * largest[..., 0])

    # Rounded probabilities, of those that are seen.
    rounded = rounding(p, dtype) * seen
    out_off = (p * off) @ v.abs() + out.abs() * row + sums(seq) * (p @ v.abs())
    all_out_off = out_off + through(rounded, v)

    # delta = sum of dout * out, of `out` as it was stored, and with the errors of its probabilities.
    dp = dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)
    delta_off = (dout.abs() * out_off).sum(-1, keepdim=True) + sums(size) * (dout * out).abs().sum(-1, keepdim=True)
    stored_out = joint(dout * rounding(out, dtype), -1)[..., None]
    delta_rounded = stored_out + joint(rounded * dp, -1)[..., None]

    off = off + log_sum_exp_off[..., None]
    ds = scale * p * (dp - delta)
    dp_off = sums(size) * (dout.abs() @ v.abs().mT) + 4 * EPS * (dp.abs() + delta.abs())
    ds_off = ds.abs() * off + scale * p * (dp_off + delta_off)
    ds_rounded = rounding(ds, dtype) * seen
    # A row's delta is one number: its error goes into dq as a whole, into dk independently by rows.
    dq_off = ds_off @ k.abs() + through(ds_rounded, k) + sums(seq) * (ds.abs() @ k.abs())
    dq_off = dq_off + scale * (p @ k).abs() * delta_rounded
    by_rows = ((scale * p).square().mT @ (q * delta_rounded).square()).sqrt()
    dk_off = ds_off.mT @ q.abs() + through(ds_rounded.mT, q) + by_rows + sums(seq) * (ds.abs().mT @ q.abs())
    dv_off = (p * off).mT @ dout.abs() + through(rounded.mT, dout) + sums(seq) * (p.mT @ dout.abs())
    return all_out_off, log_sum_exp_off, dq_off, dk_off, dv_off


def embedding(g):
    """tokens [batch, seq] i32, table, positions -> y; from dy: dtable, dpositions. The second case has no y."""
    for batch, seq, vocab, places, hidden in ((2, 19, 11, 23, 21), (29, 39, 3, 41, 5)):
        g.case(f"{batch}x{seq}x{vocab}x{places}x{hidden}")
        tokens = torch.randint(0, vocab - 1, (batch, seq))  # the last never occurs
        g.put("tokens", tokens.int())
        table, positions = g.given("table", normal(vocab, hidden)), g.given("positions", normal(places, hidden))
        dy = g.given("dy", normal(batch, seq, hidden))

        def run(dtype):
            leaves = [leaf(table, dtype), leaf(positions, dtype)]
            y = F.embedding(tokens, leaves[0]) + leaves[1][:seq]
            return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

        (y, dtable, dpositions), own = run(torch.float64), run(g.dtype)
        if vocab > 3:
            g.wanted("y", y, torch.zeros_like(y), own[0])
        count, size = torch.zeros(vocab, dtype=torch.float64), torch.zeros_like(dtable)
        count.index_add_(0, tokens.flatten(), torch.ones(batch * seq, dtype=torch.float64))
        size.index_add_(0, tokens.flatten(), dy.abs().flatten(0, 1))
        g.wanted("dtable", dtable, EPS * spread(count)[:, None] * size, own[1])
        size = torch.zeros_like(dpositions)
        size[:seq] = dy.abs().sum(0)
        g.wanted("dpositions", dpositions, EPS * spread(batch) * size, own[2])


def cross_entropy(g):
    """x [rows, hidden] · w [hidden, vocab] against targets [rows] i32 -> loss [1] (f32), dx, dw.

    numbers [4] f32: scale, gradient_scale, label_smoothing, z_loss. One case has a bias [vocab], and with it db, and
    rows whose target is -1: those are ignored."""
    variants = {"plain": (0.0, 0.0), "label_smoothing": (0.1, 0.0), "z_loss": (0.0, 0.01), "both": (0.1, 0.01)}
    for rows, hidden, vocab in ((23, 11, 37), (9, 3, 1103)):
        inputs = normal(rows, hidden), normal(hidden, vocab)
        targets = torch.randint(0, vocab, (rows,))
        for variant, numbers in variants.items():
            if vocab > 1000 and variant != "both":
                continue
            g.case(f"{rows}x{hidden}x{vocab} {variant}")
            numbers = g.given("numbers", torch.tensor([7 / 128, 3.5, *numbers], dtype=torch.float64), torch.float32)
            scale, gradient_scale, smoothing, z_loss = numbers.tolist()
            x, w = g.given("x", inputs[0]), g.given("w", inputs[1])
            g.put("targets", targets.int())

            def run(dtype):
                leaves = [leaf(x, dtype), leaf(w, dtype)]
                # As trainers in 16 bits do it: scores have the type, what follows is computed in f32.
                logits = leaves[0] @ leaves[1]
                logits = logits.to(torch.promote_types(dtype, torch.float32))
                loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
                loss = loss + z_loss * logits.logsumexp(1).square().sum()
                return [loss[None] * scale, *torch.autograd.grad(loss * gradient_scale, leaves)]

            want, own = run(torch.float64), run(g.dtype)
            offs = cross_entropy_tolerances(g.dtype, x, w, targets, numbers.tolist())
            for name, value, off, own_value in zip(("loss", "dx", "dw"), want, offs, own):
                g.wanted(name, value, off, own_value, torch.float32 if name == "loss" else None)
    cross_entropy_with_bias(g)


def cross_entropy_with_bias(g):
    """A bias is a row of w whose x is 1; rows that are ignored are not there at all."""
    rows, hidden, vocab = 9, 5, 13
    g.case(f"{rows}x{hidden}x{vocab} bias, ignored")
    numbers = torch.tensor([7 / 128, 3.5, 0.1, 0.01], dtype=torch.float64)
    scale, gradient_scale, smoothing, z_loss = g.given("numbers", numbers, torch.float32).tolist()
    x, w = g.given("x", normal(rows, hidden)), g.given("w", normal(hidden, vocab))
    bias, targets = g.given("bias", normal(vocab)), torch.randint(0, vocab, (rows,))
    targets[2::5] = -1
    g.put("targets", targets.int())
    seen = targets >= 0

    def run(dtype):
        leaves = [leaf(t, dtype) for t in (x, w, bias)]
        logits = torch.addmm(leaves[2], leaves[0], leaves[1])
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        options = {"ignore_index": -1, "label_smoothing": smoothing}
        loss = F.cross_entropy(logits, targets, reduction="sum", **options)
        loss = loss + z_loss * (logits.logsumexp(1).square() * seen).sum()
        return [loss[None] * scale, *torch.autograd.grad(loss * gradient_scale, leaves)]

    want, own = run(torch.float64), run(g.dtype)
    ones = torch.ones(int(seen.sum()), 1, dtype=torch.float64)
    inputs = torch.cat([x[seen], ones], 1), torch.cat([w, bias[None]])
    numbers = scale, gradient_scale, smoothing, z_loss
    loss_off, dx_off, dw_off = cross_entropy_tolerances(g.dtype, *inputs, targets[seen], numbers)
    all_dx_off = torch.zeros_like(x)
    all_dx_off[seen] = dx_off[:, :hidden]
    offs = loss_off, all_dx_off, dw_off[:hidden], dw_off[hidden]
    for name, value, off, own_value in zip(("loss", "dx", "dw", "db"), want, offs, own):
        g.wanted(name, value, off, own_value, torch.float32 if name == "loss" else None)


def cross_entropy_tolerances(dtype, x, w, targets, numbers):
    """Of loss, dx and dw, where all rows are one slice or dw is f32. See the docstring for what is rounded."""
    scale, gradient_scale, smoothing, z_loss = numbers
    rows, vocab = len(x), w.shape[1]
    logits = x @ w
    p, s = logits.softmax(1), logits.logsumexp(1, keepdim=True)
    target = F.one_hot(targets, vocab)
    slope = 1 + 2 * z_loss * s.abs()
    d = p * (1 + 2 * z_loss * s) - (1 - smoothing) * target - smoothing / vocab

    # Scores: a sum in f32, then a rounding to the type.
    logits_off, logits_rounded = sums(x.shape[1]) * (x.abs() @ w.abs()), rounding(logits, dtype)
    top = logits.abs().amax(1, keepdim=True)
    softmax_off = sums(vocab) + EPS * (8 + 4 * top)
    # Every term may be of the size of the scores, whatever it adds up to; the second order has one sign.
    row_off = (d.abs() * logits_off).sum(1)
    row_off = row_off + (softmax_off * (1 + slope * top) + 4 * EPS * (s.abs() + top))[:, 0]
    second = (slope[:, 0] + 2 * z_loss) * (p * logits_rounded**2).sum(1)
    loss_off = scale * ((row_off + second).sum() + joint((d * logits_rounded).flatten(), 0))

    # Derivatives: of each score its own rounding, the numerator's, and the last one are independent; the sum that a
    # row is divided by is one number.
    own = [p * slope * logits_rounded, slope * rounding(p, dtype), rounding(d, dtype)]
    own = [gradient_scale * e for e in own[:2]] + [rounding(gradient_scale * d, dtype)]
    common = gradient_scale * (slope + 2 * z_loss) * joint(p * logits_rounded, 1)[:, None]
    off = (slope + 2 * z_loss) * p * (logits_off + (p * logits_off).sum(1, keepdim=True))
    off = off + (slope + 2 * z_loss) * p * (logits_rounded + (p * logits_rounded).sum(1, keepdim=True)) ** 2
    off = gradient_scale * (off + slope * p * softmax_off + 4 * EPS * (slope * p + target + smoothing / vocab))
    size = gradient_scale * d.abs()
    dx_off = off @ w.abs().mT + through(own, w.mT) + common * (p @ w.mT).abs() + sums(vocab) * (size @ w.abs().mT)
    by_rows = ((common * x).square().mT @ p.square()).sqrt()
    dw_off = x.abs().mT @ off + through([e.mT for e in own], x).mT + by_rows + sums(rows) * (x.abs().mT @ size)
    return loss_off[None], dx_off, dw_off


def optimizers(g):
    """start [n] f32, gradients [5, n] of the type, times gradient_scale [1] -> p and the states after 5 steps, f32."""
    steps, n = 5, 131
    p, gradients = normal(n), 3 * normal(steps, n)
    gradients[:, 0], gradients[0, 1], gradients[:, 2] = 0, 0, 1e-6
    f32 = lambda x: float(torch.tensor(x, dtype=torch.float32))
    scale = f32(0.37)
    for kind in ("adamw", "sgd"):
        g.case(kind)
        at, by = g.given("start", p, torch.float32), g.given("gradients", gradients)
        g.given("gradient_scale", torch.tensor([scale], dtype=torch.float64), torch.float32)

        def run(dtype):
            parameter = leaf(at, dtype)
            if kind == "adamw":
                betas = f32(0.9), f32(0.95)
                rule = torch.optim.AdamW([parameter], f32(1e-2), betas, f32(1e-8), f32(0.1), foreach=False)
            else:
                rule = torch.optim.SGD([parameter], f32(1e-2), f32(0.9), weight_decay=f32(0.1), foreach=False)
            for gradient in by:
                parameter.grad = gradient.to(dtype) * scale
                rule.step()
            state = rule.state[parameter]
            names = ("exp_avg", "exp_avg_sq") if kind == "adamw" else ("momentum_buffer",)
            return {"p": parameter} | {name: state[name] for name in names}

        want, own = run(torch.float64), run(torch.float32)
        offs = (adamw_tolerances if kind == "adamw" else sgd_tolerances)(at, by * scale)
        for name, value in want.items():
            g.wanted(name, value, offs[name], own[name], torch.float32)


def adamw_tolerances(p, gradients):
    """Errors step by step. The first moment may cancel, so it is followed by magnitude; the second only grows."""
    lr, beta1, beta2, eps = 1e-2, 0.9, 0.95, 1e-8
    m_size = m_off = v = p_off = torch.zeros_like(p)
    m, at = m_size, p
    for t, g in enumerate(gradients, 1):
        before = m_size
        m, m_size = beta1 * m + (1 - beta1) * g, beta1 * m_size + (1 - beta1) * g.abs()
        m_off = beta1 * m_off + 4 * EPS * (m_size + before)
        v = beta2 * v + (1 - beta2) * g * g
        denominator = (v / (1 - beta2**t)).sqrt() + eps
        step = lr / (1 - beta1**t) / denominator
        at = at * (1 - lr * 0.1) - step * m
        p_off = p_off + step * (m_off + (2.5 * t + 6) * EPS * m_size) + 2 * EPS * (at.abs() + step * m_size)
    return {"p": p_off, "exp_avg": m_off, "exp_avg_sq": 5 * len(gradients) * EPS * v}


def sgd_tolerances(p, gradients):
    lr, momentum, decay = 1e-2, 0.9, 0.1
    v = v_off = p_off = torch.zeros_like(p)
    for g in gradients:
        v_off = momentum * v_off + decay * p_off + 3 * EPS * (momentum * v.abs() + g.abs() + decay * p.abs())
        v = momentum * v + g + decay * p
        p_off = p_off + lr * v_off + 2 * EPS * (p.abs() + lr * v.abs())
        p = p - lr * v
    return {"p": p_off, "momentum_buffer": v_off}


def norm(g):
    """x [4133] -> squares [2] f64 of blocks of 4,096; norms and factors [4] for clip [4, 2] f32: max_norm, loss_scale.

    damaged [301] has elements that are not finite; count [1] of them."""
    g.case("4133")
    x = g.given("x", normal(4133))
    squares = torch.stack([part.square().sum() for part in x.split(4096)])
    # Squares are exact in f64; their sums are not.
    g.wanted("squares", squares, 4096 * F64 * squares, stored=torch.float64)
    clip = g.given("clip", torch.tensor([[0, 1], [0.7, 1], [1e9, 8], [0.7, 65536]]), torch.float32)

    def run(dtype):
        total = x.to(dtype).norm()
        norms = total / clip[:, 1].to(dtype)
        limit = torch.where(clip[:, 0] > 0, clip[:, 0], torch.inf).to(dtype)
        return norms, (limit / (norms + 1e-6)).clamp(max=1) / clip[:, 1].to(dtype)

    for name, value, own in zip(("norms", "factors"), run(torch.float64), run(torch.float32)):
        g.wanted(name, value, 4 * EPS * value, own, torch.float32)

    damaged = normal(301).to(g.dtype)
    for at, value in ((0, torch.inf), (17, -torch.inf), (150, torch.nan), (299, torch.inf), (300, -torch.nan)):
        damaged[at] = value
    g.put("damaged", damaged)
    g.put("count", (~damaged.isfinite()).sum().float()[None])


def images(g):
    """x [batch, pixels, channels], w, bias -> y; from dy: dx, dw, db. steps -> pooled, of ReLU and then max pooling; from dpooled: dsteps.

    A case is named by image, kernel, stride and padding. Rows of patches have the type, and so have their derivatives."""
    cases = ((5, 4), (3, 3), (1, 1), (1, 1), 3), ((7, 5), (2, 2), (2, 2), (0, 0), 2), ((5, 7), (4, 3), (3, 2), (2, 0), 2)
    for (high, wide), kernel, stride, padding, channels in cases:
        g.case(" ".join("x".join(map(str, pair)) for pair in ((high, wide), kernel, stride, padding)))
        batch, outputs, size = 2, 3, kernel[0] * kernel[1]
        here = dict(stride=stride, padding=padding)

        def nchw(t):
            return t.reshape(batch, high, wide, -1).permute(0, 3, 1, 2)

        def rows(t):
            return t.flatten(2).transpose(1, 2)

        x = g.given("x", normal(batch, high * wide, channels))
        w, bias = g.given("w", normal(outputs, channels, *kernel)), g.given("bias", normal(outputs))
        shape = F.conv2d(nchw(x), w, **here).shape
        dy = g.given("dy", normal(batch, shape[2] * shape[3], outputs))

        def convolution(dtype):
            leaves = [leaf(t, dtype) for t in (x, w, bias)]
            y = rows(F.conv2d(nchw(leaves[0]), leaves[1], leaves[2], **here))
            return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

        (y, dx, dw, db), own = convolution(torch.float64), convolution(g.dtype)
        magnitude = rows(F.conv2d(nchw(x).abs(), w.abs(), **here))
        g.wanted("y", y, sums(channels * size) * magnitude + 2 * EPS * bias.abs(), own[0])
        flat, fold = w.reshape(outputs, -1), lambda t: rows(F.fold(t.transpose(1, 2), (high, wide), kernel, **here))
        off = sums(outputs) * (dy.abs() @ flat.abs()) + rounding(dy @ flat, g.dtype)
        g.wanted("dx", dx, fold(off) + sums(size) * fold((dy @ flat).abs()), own[1])
        patches = F.unfold(nchw(x).abs(), kernel, **here)
        magnitude = (patches @ dy.abs()).sum(0).T.reshape(w.shape)
        g.wanted("dw", dw, sums(batch * shape[2] * shape[3]) * magnitude, stored=torch.float32)
        g.wanted("db", db, sums(batch * shape[2] * shape[3]) * dy.abs().sum((0, 1)), stored=torch.float32)

        steps = g.given("steps", (2 * normal(batch, high * wide, channels)).round() / 2)
        dpooled = g.given("dpooled", normal(batch, shape[2] * shape[3], channels))

        def pooling(dtype):
            at = leaf(steps, dtype)
            y = rows(F.max_pool2d(F.relu(nchw(at)), kernel, **here))
            return y, torch.autograd.grad(y, at, dpooled.to(dtype))[0]

        (pooled, dsteps), own = pooling(torch.float64), pooling(g.dtype)
        g.wanted("pooled", pooled, torch.zeros_like(pooled), own[0])
        g.wanted("dsteps", dsteps, EPS * size * dpooled.abs().max().expand(dsteps.shape), own[1])


def convert(g):
    """x [200] of the type -> to_<other>, as PyTorch converts; into (of the type) + from_<other> = sum_<other>.

    Besides ordinary numbers of all sizes: ties between two numbers of 16 bits, the ends of ranges, subnormals."""
    g.case("200")
    sizes = torch.exp2(torch.randint(-20, 15, (200,)).double())
    x = normal(200) * sizes
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8 + 2.0**-20, 1 - 2.0**-9]
    ends = [65504, 65519.9, 65520, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-26, 5.9e-8, 0.0, 1e-30, 3e38]
    special = torch.tensor(ties + ends, dtype=torch.float64)
    special = torch.cat([special, -special])
    special = special[special.to(g.dtype).isfinite()]
    x[: len(special)] = special
    x = g.given("x", x)
    into = g.given("into", normal(67))
    for name, other in TYPES.items():
        if other != g.dtype:
            g.put(f"to_{name}", x.to(g.dtype).to(other))
        other_x = g.given(f"from_{name}", normal(67), other)
        own = into.to(g.dtype) + other_x.to(other)
        g.wanted(f"sum_{name}", into + other_x, torch.zeros(67, dtype=torch.float64), own.to(g.dtype))


FAMILIES = (linear, layer_norm, gelu, attention, embedding, cross_entropy, optimizers, norm, images, convert)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    GOLDENS.mkdir(parents=True, exist_ok=True)
    total = 0
    for family in FAMILIES:
        tensors = {}
        for type_name in TYPES:
            torch.manual_seed(20)
            family(Golden(family.__name__, type_name, tensors))
        path = GOLDENS / f"{family.__name__}.safetensors"
        save_file(tensors, path)
        total += path.stat().st_size
        print(f"{path.stat().st_size:>8} bytes  {path.name}, {len(tensors)} tensors")
    print(f"{total:>8} bytes  in all")
    assert total < BUDGET_BYTES, total
    print("Allowed and PyTorch's own error, over the largest value; the greatest share of the allowance that it takes")
    for (family, name, type_name), (allowed, own, share) in Golden.rows.items():
        print(f"{family:>13} {name:<15} {type_name:<5} allowed {allowed:.1e}  PyTorch {own:.1e}  share {share:.2f}")


if __name__ == "__main__":
    main()
