//! Times every kernel of `Cpu` at the shapes of a training step, beside what the machine can do.
//!
//! `cargo run --release -p phalanx-tensor --example kernels -- [mini|small|nano] [filter] [threads ..]`
//!
//! Memory comes from a planned arena in huge pages, as in a run. Each line is the fastest of several calls,
//! for each number of threads (one and two): milliseconds, achieved rate (GFLOP/s, or GB/s where no
//! products are computed) and its share of the floor (multiply-adds from registers; memory read and written
//! in place), and the gain over the first number of threads.

use std::time::{Duration, Instant};

use phalanx_plan::memory::plan_memory;
use phalanx_tensor::cpu::pool::Pool;
use phalanx_tensor::cpu::{Options, peak};
use phalanx_tensor::{
    AdamW, Arena, Category, Cpu, CrossEntropy, CrossEntropyGradients, DType, Device, Epilogue, Heads, Layout,
    NORM_BLOCK, Region, Tensor, Weight,
};

/// A training setting.
#[derive(Clone, Copy)]
struct Setting {
    batch: usize,
    seq: usize,
    hidden: usize,
    heads: usize,
    vocab: usize,
    slice: usize,
}

const SETTINGS: [(&str, Setting); 3] = [
    ("mini", Setting { batch: 8, seq: 256, hidden: 512, heads: 8, vocab: 50_257, slice: 256 }),
    ("small", Setting { batch: 4, seq: 256, hidden: 768, heads: 12, vocab: 50_257, slice: 256 }),
    ("nano", Setting { batch: 12, seq: 64, hidden: 128, heads: 4, vocab: 65, slice: 768 }),
];

fn main() {
    let mut args = std::env::args().skip(1).peekable();
    let named = args.peek().and_then(|a| SETTINGS.iter().find(|(name, _)| name == a));
    let (name, setting) = *named.unwrap_or(&SETTINGS[0]);
    if named.is_some() {
        args.next();
    }
    let filter = args.next().unwrap_or_default();
    let threads: Vec<usize> = args.map(|a| a.parse().expect("a number of threads")).collect();
    let threads = if threads.is_empty() { vec![1, 2] } else { threads };
    println!("{name}");
    let mut columns: Vec<Vec<Line>> = Vec::new();
    for &threads in &threads {
        let cpu = Cpu::new(threads);
        let (flops, bytes) = (peak::flops_per_s(&cpu), peak::bytes_per_s(&cpu, 1 << 28));
        let fork = fork_join_us(threads);
        let isa = cpu.isa().name();
        println!(
            "{threads} threads, {isa}: {:.0} GFLOP/s, {:.1} GB/s, {fork:.2} us a fork and join",
            flops / 1e9,
            bytes / 1e9
        );
        let meta = Device::meta(threads);
        meta.phase("init", || drop(Bench::new(&meta, setting)));
        let plan = plan_memory(&meta.take_trace(0)).expect("a plan of one phase");
        let region = Region::anonymous(plan.arena_bytes as usize).expect("memory");
        let device = Device::new(cpu, Arena::replaying(plan, region));
        device.arena().begin("init");
        let bench = Bench::new(&device, setting);
        columns.push(bench.run(&device, &filter, [flops, bytes]));
    }
    for (index, line) in columns[0].iter().enumerate() {
        print!("{:40}", line.name);
        for column in &columns {
            print!(" {} x{:.2}", column[index].text(), line.seconds / column[index].seconds);
        }
        println!();
    }
}

/// Microseconds of a run of two empty tasks.
fn fork_join_us(threads: usize) -> f64 {
    let pool = Pool::new(threads, Options::new(threads).spin);
    let one = |_| {
        let start = Instant::now();
        (0..1000).for_each(|_| pool.run(2, &|_| ()));
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..20).map(one).fold(f64::MAX, f64::min)
}

/// One measurement.
struct Line {
    name: String,
    seconds: f64,
    rate: f64,
    unit: &'static str,
    share: f64,
}

impl Line {
    fn text(&self) -> String {
        format!(
            "{:9.3} ms {:6.1} {} {:3.0}%",
            self.seconds * 1e3,
            self.rate / 1e9,
            self.unit,
            self.share * 100.0
        )
    }
}

/// All tensors, named as in a GPT-2 block.
struct Bench {
    setting: Setting,
    wide: [Tensor; 2],
    narrow: [Tensor; 4],
    qkv: [Tensor; 2],
    weight: [Tensor; 2],
    vectors: [Tensor; 3],
    rows: [Tensor; 2],
    log_sum_exp: Tensor,
    table: [Tensor; 4],
    logits: Tensor,
    tokens: Tensor,
    one: Tensor,
    squares: Tensor,
}

impl Bench {
    fn new(device: &Device, s: Setting) -> Bench {
        let rows = s.batch * s.seq;
        let tensor = |shape: &[usize]| {
            let mut t = device.alloc(DType::F32, shape, Category::Workspace, "bench");
            let values: Vec<f32> =
                (0..t.shape().elements()).map(|i| (i * 7919 % 2003) as f32 / 1e3 - 1.0).collect();
            device.upload(&values, t.view_mut());
            t
        };
        let (h, table) = (s.hidden, s.vocab * s.hidden);
        let mut tokens = device.alloc(DType::U32, [s.batch, s.seq], Category::Workspace, "tokens");
        let ids: Vec<u32> = (0..rows).map(|i| (i * 7919 % s.vocab) as u32).collect();
        device.upload(&ids, tokens.view_mut());
        Bench {
            setting: s,
            wide: [(); 2].map(|()| tensor(&[rows, 4 * h])),
            narrow: [(); 4].map(|()| tensor(&[rows, h])),
            qkv: [(); 2].map(|()| tensor(&[s.batch, s.seq, 3 * h])),
            weight: [(); 2].map(|()| tensor(&[4 * h * h])),
            vectors: [(); 3].map(|()| tensor(&[4 * h])),
            rows: [(); 2].map(|()| tensor(&[rows])),
            log_sum_exp: tensor(&[s.batch, s.heads, s.seq]),
            table: [(); 4].map(|()| tensor(&[s.vocab, h])),
            logits: tensor(&[s.slice, s.vocab]),
            tokens,
            one: tensor(&[1]),
            squares: device.alloc(DType::F64, [table.div_ceil(NORM_BLOCK)], Category::Workspace, "squares"),
        }
    }

    /// Times everything whose name contains `filter`.
    fn run(mut self, device: &Device, filter: &str, peaks: [f64; 2]) -> Vec<Line> {
        let mut timer = Timer { filter, peaks, lines: Vec::new() };
        self.products(device, &mut timer);
        self.block(device, &mut timer);
        self.attention(device, &mut timer);
        self.ends(device, &mut timer);
        self.head(device, &mut timer);
        self.optimizer(device, &mut timer);
        timer.lines
    }

    fn products(&mut self, device: &Device, timer: &mut Timer) {
        let h = self.setting.hidden;
        let rows = self.setting.batch * self.setting.seq;
        for (inner, out) in [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] {
            let flops = 2 * rows * inner * out;
            for layout in [Layout::InOut, Layout::OutIn] {
                let shape = if layout == Layout::InOut { [inner, out] } else { [out, inner] };
                let [x, dy] = &mut self.wide;
                let x = x.view().range(0..rows * inner).reshape([rows, inner]);
                let mut y = dy.view_mut().range(0..rows * out).reshape([rows, out]);
                let [w, dw] = &mut self.weight;
                let w = Weight { matrix: w.view().range(0..inner * out).reshape(shape), layout };
                let mut dw = dw.view_mut().range(0..inner * out).reshape(shape);
                let bias = self.vectors[0].view().range(0..out);
                let name = |what: &str| format!("{what} {rows} x {inner} x {out} {layout:?}");
                timer.products(name("linear"), flops, || {
                    device.linear(x, w, Epilogue { bias: Some(bias), residual: None }, y.reborrow())
                });
                let mut y = dy.view_mut().range(0..rows * inner).reshape([rows, inner]);
                let dy = self.qkv[0].view();
                let dy = if out > 3 * h { self.logits.view() } else { dy };
                if dy.elements() < rows * out {
                    continue;
                }
                let dy = dy.range(0..rows * out).reshape([rows, out]);
                timer
                    .products(name("dx"), flops, || device.linear_input_gradient(dy, w, y.reborrow(), false));
                timer.products(name("dw"), flops, || {
                    device.linear_weight_gradient(x, dy, dw.reborrow(), layout, true);
                });
            }
        }
    }

    fn block(&mut self, device: &Device, timer: &mut Timer) {
        let h = self.setting.hidden;
        let rows = self.setting.batch * self.setting.seq;
        let [x, y] = &mut self.wide;
        let bytes = rows * h * 4;
        timer.bytes("gelu", 8 * bytes, || device.gelu(x.view(), y.view_mut()));
        let [db, dgamma, dbeta] = &mut self.vectors;
        timer.bytes("gelu_backward", 12 * bytes, || {
            device.gelu_backward(x.view(), y.view_mut(), db.view_mut(), true)
        });
        timer.bytes("bias_gradient 4h", 4 * bytes, || device.bias_gradient(x.view(), db.view_mut(), true));
        let [x, y, dy, dx] = &mut self.narrow;
        let [mean, rstd] = &mut self.rows;
        let weight = self.weight[0].view();
        let [gamma, beta] = [weight.range(0..h), weight.range(h..2 * h)];
        timer.bytes("layer_norm", 2 * bytes, || {
            device.layer_norm(
                x.view(),
                [gamma, beta],
                1e-5,
                y.view_mut(),
                [mean.view_mut(), rstd.view_mut()],
            );
        });
        timer.bytes("layer_norm_backward", 4 * bytes, || {
            let parameters = [dgamma.view_mut().range(0..h), dbeta.view_mut().range(0..h)];
            let statistics = [mean.view(), rstd.view()];
            device.layer_norm_backward(
                x.view(),
                gamma,
                statistics,
                dy.view(),
                dx.view_mut(),
                true,
                parameters,
                true,
            );
        });
        timer.bytes("add", 3 * bytes, || device.add(x.view(), y.view_mut()));
        timer.bytes("copy", 2 * bytes, || device.copy(x.view(), y.view_mut()));
    }

    fn attention(&mut self, device: &Device, timer: &mut Timer) {
        let Setting { batch, seq, hidden, heads, .. } = self.setting;
        for causal in [true, false] {
            let product = 2 * batch * seq * seq * hidden / (1 + usize::from(causal));
            let heads = Heads { heads, causal };
            let [qkv, dqkv] = &mut self.qkv;
            let [out, dout, ..] = &mut self.narrow;
            let mut out = out.view_mut().reshape([batch, seq, hidden]);
            let dout = dout.view().reshape([batch, seq, hidden]);
            let lse = &mut self.log_sum_exp;
            let name = |what: &str| format!("{what} {}", if causal { "causal" } else { "full" });
            timer.products(name("attention"), 2 * product, || {
                device.attention(qkv.view(), heads, None, out.reborrow(), lse.view_mut());
            });
            timer.products(name("attention_backward"), 5 * product, || {
                device.attention_backward(
                    qkv.view(),
                    [out.as_view(), lse.view(), dout],
                    heads,
                    None,
                    dqkv.view_mut(),
                );
            });
        }
    }

    fn ends(&mut self, device: &Device, timer: &mut Timer) {
        let Setting { batch, seq, hidden, vocab, .. } = self.setting;
        let rows = batch * seq;
        let [table, dtable, ..] = &mut self.table;
        let [x, dx, positions, ..] = &mut self.narrow;
        let mut dx3 = dx.view_mut().reshape([batch, seq, hidden]);
        let places = positions.view_mut().range(0..seq * hidden).reshape([seq, hidden]);
        let bytes = rows * hidden * 4;
        timer.bytes("embedding", 2 * bytes, || {
            device.embedding(self.tokens.view(), table.view(), places.as_view(), dx3.reborrow());
        });
        let mut places = places;
        timer.bytes("embedding_backward", 3 * bytes, || {
            let dy = dx3.as_view();
            device.embedding_backward(
                self.tokens.view(),
                dy,
                dtable.view_mut(),
                places.reborrow(),
                [true, true],
            );
        });
        let product = 2 * rows * hidden * vocab;
        let tokens = self.tokens.view().reshape([rows]);
        let one = &mut self.one;
        let logits = &mut self.logits;
        for layout in [Layout::OutIn, Layout::InOut] {
            let shape = if layout == Layout::OutIn { [vocab, hidden] } else { [hidden, vocab] };
            let w = Weight { matrix: table.view().reshape(shape), layout };
            timer.products(format!("linear_cross_entropy {layout:?}"), 3 * product, || {
                let dw = dtable.view_mut().reshape(shape);
                let gradients = CrossEntropyGradients { dx: dx.view_mut(), dw, accumulate: false };
                let loss = one.view_mut();
                device.linear_cross_entropy(
                    x.view(),
                    w,
                    tokens,
                    CrossEntropy::scaled(1e-3),
                    logits.view_mut(),
                    loss,
                    Some(gradients),
                );
            });
            timer.products(format!("loss alone {layout:?}"), product, || {
                device.linear_cross_entropy(
                    x.view(),
                    w,
                    tokens,
                    CrossEntropy::scaled(1e-3),
                    logits.view_mut(),
                    one.view_mut(),
                    None,
                );
            });
        }
    }

    /// The products of one slice of logits, alone.
    fn head(&mut self, device: &Device, timer: &mut Timer) {
        let Setting { batch, seq, hidden, vocab, .. } = self.setting;
        let [table, dtable, ..] = &mut self.table;
        let [x, dx, ..] = &mut self.narrow;
        let slice = self.setting.slice.min(batch * seq);
        let flops = 2 * slice * hidden * vocab;
        for layout in [Layout::OutIn, Layout::InOut] {
            let shape = if layout == Layout::OutIn { [vocab, hidden] } else { [hidden, vocab] };
            let w = Weight { matrix: table.view().reshape(shape), layout };
            let mut dw = dtable.view_mut().reshape(shape);
            let x = x.view().range(0..slice * hidden).reshape([slice, hidden]);
            let mut logits = self.logits.view_mut().range(0..slice * vocab).reshape([slice, vocab]);
            let name = |what: &str| format!("head {what} {slice} x {hidden} x {vocab} {layout:?}");
            timer.products(name("linear"), flops, || {
                device.linear(x, w, Epilogue::default(), logits.reborrow())
            });
            timer.products(name("dx"), flops, || {
                let dx = dx.view_mut().range(0..slice * hidden).reshape([slice, hidden]);
                device.linear_input_gradient(logits.as_view(), w, dx, false);
            });
            timer.products(name("dw"), flops, || {
                device.linear_weight_gradient(x, logits.as_view(), dw.reborrow(), layout, true);
            });
        }
    }

    fn optimizer(&mut self, device: &Device, timer: &mut Timer) {
        let [p, g, m, v] = &mut self.table;
        device.fill(v.view_mut(), 0.5);
        let step = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 10 };
        let bytes = p.view().bytes();
        timer.bytes("adamw", 7 * bytes, || {
            device.adamw(step, p.view_mut(), g.view(), m.view_mut(), v.view_mut(), self.one.view(), None);
        });
        timer.bytes("block_squares", bytes, || device.block_squares(g.view(), self.squares.view_mut()));
        timer.bytes("fill", bytes, || device.fill(g.view_mut(), 0.0));
    }
}

/// Collects measurements.
struct Timer<'a> {
    filter: &'a str,
    peaks: [f64; 2],
    lines: Vec<Line>,
}

impl Timer<'_> {
    fn products(&mut self, name: String, flops: usize, call: impl FnMut()) {
        self.time(name, flops as f64, "GF/s", self.peaks[0], call);
    }

    fn bytes(&mut self, name: &str, bytes: usize, call: impl FnMut()) {
        self.time(name.to_owned(), bytes as f64, "GB/s", self.peaks[1], call);
    }

    /// Fastest of the calls of 0.4 seconds, five at least.
    fn time(&mut self, name: String, amount: f64, unit: &'static str, peak: f64, mut call: impl FnMut()) {
        if !name.contains(self.filter) {
            return;
        }
        call();
        let (begin, mut calls, mut best) = (Instant::now(), 0, Duration::MAX);
        while calls < 5 || begin.elapsed() < Duration::from_millis(400) {
            let start = Instant::now();
            call();
            best = best.min(start.elapsed());
            calls += 1;
        }
        let rate = amount / best.as_secs_f64();
        self.lines.push(Line { name, seconds: best.as_secs_f64(), rate, unit, share: rate / peak });
    }
}
