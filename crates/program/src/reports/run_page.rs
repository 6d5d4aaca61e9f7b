//! A page about one run or several: HTML, style and pictures in one file, which asks for nothing on a network.

use std::fmt::Write;

use phalanx_drawing::chart::{Series, chart};
use phalanx_drawing::report::{bytes, count, seconds};
use phalanx_drawing::svg::escaped;
use serde_json::Value;
use toml::Table;

use crate::arguments::args::BUILD;

/// How every page begins; what begins otherwise is somebody's own.
pub const BEGINS: &str = "<!doctype html>\n<!-- phalanx report -->\n";

/// What is shown of a run.
pub struct Shown {
    /// Its folder.
    pub name: String,
    /// The text of `config.toml`.
    pub config: String,
    /// The lines of `metrics.jsonl`.
    pub lines: Vec<Value>,
    /// `plan.json`
    pub planned: Option<Value>,
    /// `memory.json`, which a run writes after its first step.
    pub measured: Option<Value>,
}

/// Charts: the name in lines, the heading.
const CHARTS: [(&str, &str); 8] = [
    ("loss", "Loss (nats per target)"),
    ("val_loss", "Validation loss (nats per target)"),
    ("lr", "Learning rate"),
    ("grad_norm", "Gradient norm before clipping"),
    ("loss_scale", "Loss scale"),
    ("tokens_per_s", "Tokens per second"),
    ("accuracy", "Accuracy (share of held-out windows)"),
    ("reward_margin", "Margin of rewards (nats)"),
];

const STYLE: &str = "\
:root{color-scheme:light dark;--back:#fff;--text:#1d1d1f;--soft:#6b6b70;--rule:#e2e2e6;--card:#f7f7f9;--c0:#2563eb;--c1:#d9480f;--c2:#2b8a3e;--c3:#9c36b5;--c4:#0b7285;--c5:#868e96}
@media(prefers-color-scheme:dark){:root{--back:#151517;--text:#ececf0;--soft:#9a9aa2;--rule:#34343a;--card:#1e1e22;--c0:#7aa2ff;--c1:#ff9a62;--c2:#69db7c;--c3:#da77f2;--c4:#66d9e8;--c5:#adb5bd}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1240px;padding:16px;background:var(--back);color:var(--text);font:15px/1.45 system-ui,sans-serif}
h1{font-size:22px;margin:8px 0}h2{font-size:18px;margin:28px 0 8px}h3{font-size:14px;margin:0 0 6px}
.cards,.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}.charts{grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr))}
.cards div,figure{margin:0;padding:10px 12px;background:var(--card);border:1px solid var(--rule);border-radius:8px}.cards b{display:block;font-size:18px}.cards span,.note{color:var(--soft);font-size:13px}
figure svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}.grid{stroke:var(--rule)}.line,.dot{fill:none;stroke-width:1.6}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}
.k0{background:var(--c0)}.k1{background:var(--c1)}.k2{background:var(--c2)}.k3{background:var(--c3)}.k4{background:var(--c4)}.k5{background:var(--c5)}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 5px 0 0}.legend span{margin-right:14px;white-space:nowrap}
.wide{overflow-x:auto;margin-bottom:14px}table{border-collapse:collapse;font-size:13px}th,td{padding:4px 10px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}
.bar{display:flex;height:14px;min-width:160px;border-radius:3px;overflow:hidden}pre{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px}
";

/// The page about `runs`, of which the first names it.
pub fn page(runs: &[Shown]) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = escaped(&names.join(", "));
    let mut page = format!(
        "{BEGINS}<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    );
    if runs.len() > 1 {
        let keys = names
            .iter()
            .enumerate()
            .map(|(at, name)| format!("<span><i class=\"key k{}\"></i>{}</span>", at % 6, escaped(name)));
        let _ = writeln!(page, "<p class=\"legend\">{}</p>", keys.collect::<String>());
    }
    runs.iter().for_each(|run| summary(&mut page, run, runs.len() > 1));
    charts(&mut page, runs);
    runs.iter().for_each(|run| memory(&mut page, run));
    if let [first, others @ ..] = runs {
        others.iter().for_each(|other| differences(&mut page, first, other));
    }
    for run in runs {
        let _ = writeln!(
            page,
            "<h2>Configuration</h2>\n<details><summary>{}/config.toml</summary><pre>{}</pre></details>",
            escaped(&run.name),
            escaped(&run.config)
        );
    }
    page + &format!("<p class=\"note\">phalanx {}</p></body></html>\n", escaped(BUILD))
}

impl Shown {
    /// Values of `name` by step: of evaluations for names that they alone have, else of steps.
    fn points(&self, name: &str) -> Vec<[f64; 2]> {
        let is_evaluation = ["val_loss", "accuracy"].contains(&name);
        let is_kind = |line: &Value| line.get("val_loss").is_some() == is_evaluation;
        let of = |line: &Value| {
            Some([line["step"].as_f64()?, line.get(name).filter(|_| is_kind(line))?.as_f64()?])
        };
        self.lines.iter().filter_map(of).collect()
    }

    fn last(&self, name: &str) -> Option<f64> {
        self.points(name).last().map(|[_, value]| *value)
    }
}

/// The numbers of a run that are asked for first.
fn summary(page: &mut String, run: &Shown, is_named: bool) {
    let config = run.config.parse::<Table>().unwrap_or_default();
    let steps = config.get("train").and_then(|train| train.get("steps")).and_then(toml::Value::as_integer);
    let step = run.last("tokens").and(run.lines.iter().filter_map(|line| line["step"].as_u64()).max());
    let mut times: Vec<f64> = run.points("step_s").into_iter().map(|[_, value]| value).collect();
    times.sort_by(f64::total_cmp);
    let four = |value: f64| format!("{value:.4}");
    let cards = [
        ("step", step.map(|step| steps.map_or(step.to_string(), |steps| format!("{step} of {steps}")))),
        ("loss", run.last("loss").map(four)),
        ("validation loss", run.last("val_loss").map(four)),
        ("tokens", run.last("tokens").map(count)),
        ("median step", times.get(times.len() / 2).copied().map(seconds)),
        ("tokens per second", run.last("tokens_per_s").map(count)),
        ("model FLOPs utilisation", run.last("mfu").map(|mfu| format!("{:.1}%", 100.0 * mfu))),
        ("trained for", run.last("elapsed_s").map(seconds)),
    ];
    if is_named {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(&run.name));
    }
    page.push_str("<div class=\"cards\">\n");
    for (name, value) in cards {
        if let Some(value) = value {
            let id = name.replace(' ', "-");
            let _ = writeln!(page, "<div><b data-name=\"{id}\">{value}</b><span>{name}</span></div>");
        }
    }
    page.push_str("</div>\n");
}

fn charts(page: &mut String, runs: &[Shown]) {
    page.push_str("<h2>Over steps</h2>\n<div class=\"charts\">\n");
    let before = page.len();
    for (name, heading) in CHARTS {
        let series: Vec<Series> =
            runs.iter().map(|run| Series { name: &run.name, points: run.points(name) }).collect();
        if let Some(svg) = chart(heading, &series) {
            let _ = writeln!(page, "<figure><h3>{heading}</h3>\n{svg}</figure>");
        }
    }
    if page.len() == before {
        page.push_str("<p class=\"note\">No step has been made.</p>\n");
    }
    page.push_str("</div>\n");
}

/// Memory of each rank, planned and measured, with the categories of the plan.
fn memory(page: &mut String, run: &Shown) {
    let Some(planned) = run.planned.as_ref().and_then(|plan| plan["ranks"].as_array()) else { return };
    let measured = run.measured.as_ref().and_then(|measured| measured["ranks"].as_array());
    let _ = writeln!(page, "<h2>Memory of {}</h2>", escaped(&run.name));
    for kind in ["device", "host", "disk"] {
        let peak = |rank: &Value| rank[kind]["peak_bytes"].as_u64().unwrap_or(0);
        let largest = planned.iter().map(peak).max().unwrap_or(0);
        if largest == 0 {
            continue;
        }
        let mut names: Vec<&String> = planned
            .iter()
            .filter_map(|rank| rank[kind]["categories"].as_object())
            .flat_map(|all| all.keys())
            .collect();
        names.sort();
        names.dedup();
        let of = |rank: &Value, name: &str| rank[kind]["categories"][name].as_u64().unwrap_or(0);
        names.retain(|name| planned.iter().any(|rank| of(rank, name) > 0));
        let keys = names
            .iter()
            .enumerate()
            .map(|(at, name)| format!("<span><i class=\"key k{}\"></i>{}</span>", at % 6, escaped(name)));
        let _ = writeln!(
            page,
            "<h3>{kind} memory at its peak</h3>\n<p class=\"legend\">{}</p>",
            keys.collect::<String>()
        );
        let heads: String = names.iter().map(|name| format!("<th>{}</th>", escaped(name))).collect();
        let _ = writeln!(
            page,
            "<div class=\"wide\"><table><tr><th>rank</th><th></th>{heads}<th>planned</th><th>measured</th></tr>"
        );
        for (number, rank) in planned.iter().enumerate() {
            let parts = names.iter().enumerate().map(|(at, name)| {
                let share = 100.0 * of(rank, name) as f64 / largest as f64;
                format!("<i class=\"k{}\" style=\"width:{share:.2}%\"></i>", at % 6)
            });
            let cells = names.iter().map(|name| format!("<td>{}</td>", bytes(of(rank, name))));
            let taken = measured.and_then(|ranks| ranks.get(number)).map(|rank| &rank[kind]);
            let taken = match taken {
                None => "not yet".to_string(),
                Some(taken) if taken["peak_bytes"] == rank[kind]["peak_bytes"] => "to the byte".to_string(),
                Some(taken) => bytes(taken["peak_bytes"].as_u64().unwrap_or(0)),
            };
            let _ = writeln!(
                page,
                "<tr><td>{number}</td><td><div class=\"bar\">{}</div></td>{}<td title=\"{} bytes\">{}</td><td>{taken}</td></tr>",
                parts.collect::<String>(),
                cells.collect::<String>(),
                peak(rank),
                bytes(peak(rank))
            );
        }
        page.push_str("</table></div>\n");
    }
}

/// The keys whose values differ from those of the first run.
fn differences(page: &mut String, first: &Shown, other: &Shown) {
    let [a, b] = [first, other].map(|run| keys(&run.config));
    let mut paths: Vec<&String> = a.iter().chain(&b).map(|(path, _)| path).collect();
    paths.sort();
    paths.dedup();
    let of = |keys: &[(String, String)], path: &str| {
        keys.iter()
            .find(|(other, _)| other == path)
            .map_or("left out".to_string(), |(_, value)| escaped(value))
    };
    let rows: String = paths
        .into_iter()
        .map(|path| (path, of(&a, path), of(&b, path)))
        .filter(|(_, a, b)| a != b)
        .map(|(path, a, b)| format!("<tr><td>{}</td><td>{a}</td><td>{b}</td></tr>\n", escaped(path)))
        .collect();
    let heads = [first, other].map(|run| format!("<th>{}</th>", escaped(&run.name))).concat();
    let table = match rows.is_empty() {
        true => "<p class=\"note\">none</p>".to_string(),
        false => format!("<div class=\"wide\"><table><tr><th>key</th>{heads}</tr>\n{rows}</table></div>"),
    };
    let _ = writeln!(page, "<h2>Differences of configurations</h2>\n{table}");
}

/// Every key of a configuration with its value.
fn keys(config: &str) -> Vec<(String, String)> {
    let tables = config.parse::<Table>().unwrap_or_default();
    let of_table = |(table, value): (&String, &toml::Value)| {
        let keys = value.as_table().cloned().unwrap_or_default();
        keys.iter().map(|(key, value)| (format!("{table}.{key}"), value.to_string())).collect::<Vec<_>>()
    };
    tables.iter().flat_map(of_table).collect()
}
