//! Chat templates: Jinja as transformers renders it (`render_jinja_template` of 5.24), by the crate `minijinja`.
//!
//! `{% generation %}` is no tag of Jinja: it becomes a block with a filter, which keeps the rules about white space. A template may
//! come from anywhere, so it has a budget (fuel), which bounds its time and the memory of what it makes.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python::{self, Day};
use super::{MARK, mark};

/// Instructions of one rendering, and bytes that it makes, by 64: about a second, and 640 MB.
const FUEL: u64 = 10_000_000;

/// Bytes of the stack on which a template runs, of which only those that it needs take memory: values within each other, as deep as its
/// budget allows, are freed by recursion.
const STACK: usize = 1 << 30;

/// Depth of macros and blocks within each other.
const RECURSION: usize = 200;

const NAME: &str = "chat template";

/// The filter that stands for the tag `generation`.
const GENERATION: &str = "generation__";

/// ChatML, as Qwen 2 has it.
const CHATML: &str = "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// That of Llama 3, without tools and dates.
const LLAMA3: &str = "{{- bos_token }}{%- for message in messages %}\
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}\
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}\
    {%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}\
    {%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

/// A compiled template.
pub(super) struct Template {
    environment: Environment<'static>,
    /// Special tokens by role.
    roles: Vec<(String, Value)>,
    /// True if it says itself what is generated.
    pub marks_generation: bool,
    /// Texts that it writes before an answer, the longest first.
    pub headers: Vec<String>,
}

/// The source of a template by its name in configurations; `None` for another name.
pub fn named_template(name: &str) -> Option<&'static str> {
    match name {
        "chatml" => Some(CHATML),
        "llama3" => Some(LLAMA3),
        _ => None,
    }
}

impl Template {
    /// Compiles `source`. `roles` are special tokens (`bos_token`, ...), `day` is what `strftime_now` says. The error is a reason to
    /// print.
    pub(super) fn new(source: &str, roles: Vec<(String, String)>, day: Day) -> Result<Template, String> {
        let (source, marks_generation) = without_generation(source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(|output, _, value| {
            output.write_str(&python::shown(value)?).map_err(|_| Error::from(ErrorKind::WriteFailure))
        });
        // Python's `None` is not iterable; texts and dictionaries are sequences.
        let lists = |value: &Value| {
            matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
        };
        environment
            .add_test("iterable", move |value: &Value| lists(value) || value.kind() == ValueKind::Iterable);
        environment.add_test("sequence", move |value: &Value| lists(value));
        environment.add_filter("tojson", python::to_json);
        environment.add_filter("string", |value: &Value| python::shown(value));
        environment.add_filter(GENERATION, |text: &str| [&mark('g', 0), text, &mark('h', 0)].concat());
        environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_function("strftime_now", move |format: &str| {
            day.format(format).map_err(|part| {
                let reason =
                    format!("strftime_now({format:?}): {part} is not the same in all chats of a run");
                Error::new(ErrorKind::InvalidOperation, reason)
            })
        });
        environment.add_template_owned(NAME, source).map_err(|error| explained(&error))?;
        let roles = roles.into_iter().map(|(role, token)| (role, Value::from(token))).collect();
        let template = Template { environment, roles, marks_generation, headers: Vec::new() };
        Ok(Template { headers: template.find_headers(), ..template })
    }

    /// The text of messages, with the marks of `generation` if it has them. `begins_answer` adds what comes before an answer. The
    /// error is a reason to print.
    pub(super) fn render(
        &self,
        messages: Vec<Value>,
        tools: Option<&Value>,
        begins_answer: bool,
    ) -> Result<String, String> {
        let template = self.environment.get_template(NAME).map_err(|error| explained(&error))?;
        let own = [
            ("messages", Value::from(messages)),
            ("tools", tools.cloned().unwrap_or(Value::from(()))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(begins_answer)),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_string(), value));
        let context: Value = Value::from_pairs(self.roles.iter().cloned().chain(own));
        std::thread::scope(|scope| {
            let render = move || template.render(context).map_err(|error| explained(&error));
            let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, render);
            let thread =
                thread.map_err(|error| format!("no thread starts for the chat template: {error}"))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// The reason of an error, with the line of the template.
fn explained(error: &Error) -> String {
    let line = error.line().map_or(String::new(), |line| format!(" in line {line}"));
    let reason = match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("it takes more than {FUEL} instructions for one chat, as one that never ends")
        }
        kind => error.detail().map_or_else(|| kind.to_string(), |detail| detail.replace(MARK, "")),
    };
    let cause = std::error::Error::source(error).map_or(String::new(), |cause| format!(" ({cause})"));
    format!("the chat template stops{line}: {reason}{cause}")
}

/// The source with blocks of a filter in place of `generation`, and whether there was one.
fn without_generation(source: &str) -> (String, bool) {
    let (mut text, mut rest, mut found) = (String::new(), source, false);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let inner = tag[2..].trim_start_matches(['-', '+']).trim_start();
        let word = ["generation", "endgeneration"].into_iter().find(|word| {
            let behind =
                inner.strip_prefix(word).map(|behind| behind.trim_start().trim_start_matches(['-', '+']));
            behind.is_some_and(|behind| behind.starts_with("%}"))
        });
        let length = tag.len() - inner.len();
        text.push_str(&tag[..length]);
        rest = inner;
        if let Some(word) = word {
            found = true;
            text.push_str(&if word == "generation" {
                format!("filter {GENERATION}")
            } else {
                "endfilter".into()
            });
            rest = &inner[word.len()..];
        }
    }
    text.push_str(rest);
    (text, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &str) -> Result<String, String> {
        let roles = vec![("bos_token".to_string(), "<s>".to_string())];
        let template = Template::new(source, roles, Day::parse("2026-11-28").unwrap())?;
        template.render(serde_json::from_str(messages).unwrap(), None, false)
    }

    const CHAT: &str =
        r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": " b ", "x": null}]"#;

    #[test]
    fn templates_are_rendered_as_by_transformers() {
        for (source, expected) in [
            (
                "{{ bos_token }}{% for m in messages %}\n{{ m.role }}:{{ m['content'] }};{% endfor %}",
                "<s>user:a;assistant: b ;",
            ),
            (
                "{% for m in messages %}\n  {%- if loop.first %}{% continue %}{% endif %}\n  {{ m.content.strip() }}\n{% endfor %}",
                "  b\n",
            ),
            (
                "{{ messages[-1].x }} {{ messages[0].y }}|{{ true }} {{ 1.0 }} {{ messages[0] }}",
                "None |True 1.0 {'role': 'user', 'content': 'a'}",
            ),
            ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "a"}"#),
            (
                "{{ strftime_now('%d %b %Y') }}{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}",
                "28 Nov 20262",
            ),
            (
                "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].content ~ 1) }}{{ messages[::-1][0].role }}\n",
                "[a1]assistant",
            ),
            (
                "{{ 'x'.split(',')[0].startswith('x') }}{{ messages[0].get('z', 'd') }}{{ 'A' in 'ABC' }}",
                "TruedTrue",
            ),
        ] {
            assert_eq!(render(source, CHAT).as_deref(), Ok(expected), "{source}");
        }
        let generation = "{%- for m in messages %}\n  {%- generation -%}\n  {{ m.content }}\n  {%- endgeneration %}\n{% endfor %}";
        let [begin, end] = [mark('g', 0), mark('h', 0)];
        assert_eq!(render(generation, CHAT).unwrap(), format!("{begin}a{end}{begin} b {end}"));
    }

    #[test]
    fn templates_that_loop_recurse_grow_or_refuse_are_errors() {
        let doubled = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
        let endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
        for (source, part) in [
            (endless, "10000000 instructions"),
            (doubled, "10000000 instructions"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
            (
                "{% set ns = namespace(x=[]) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
                "nested more than 200",
            ),
            (
                "{% set ns = namespace(x=[]) %}{% for i in range(300) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
                "nested more than 200",
            ),
            (
                "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}",
                "10000000 instructions",
            ),
            ("{{ raise_exception('roles must alternate') }}", "in line 1: roles must alternate"),
            ("\n{{ messages[0].x.y }}", "in line 2"),
            ("{{ 'a' | unknown }}", "unknown"),
            ("{% if %}", "line 1"),
            ("{% include 'x' %}", "in line 1"),
            ("{{ strftime_now('%H:%M') }}", "%H is not the same"),
            ("{{ messages[0] + 1 }}", "in line 1"),
        ] {
            let refused = render(source, CHAT).unwrap_err();
            assert!(refused.contains(part), "{source}: {refused}");
        }
    }
}
