//! The three verdicts, as lines of a table and as JSON.

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::health::{Answer, Judged};
use serde_json::{Value, json};

/// Returns one line per question: its verdict, the figure that it rests on, what to
/// do.
pub(crate) fn table(answers: &[Answer]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    for answer in answers {
        table.add_row([
            answer.question.words().to_owned(),
            answer.verdict.to_string(),
            answer.words(),
        ]);
    }
    table
}

/// Returns an answer with every figure, its bounds and what they come to.
pub(crate) fn json(answer: &Answer) -> Value {
    let figure = |judged: &Judged| {
        let bound = judged.bound;
        json!({
            "name": bound.name,
            "value": judged.value,
            "verdict": judged.verdict,
            "side": bound.side.as_str(),
            "watch": bound.watch,
            "ill": bound.ill,
            "decides": bound.decides,
            "source": bound.source,
            "advice": bound.advice,
        })
    };
    json!({
        "question": answer.question,
        "verdict": answer.verdict,
        "reason": answer.words(),
        "figures": answer.figures.iter().map(figure).collect::<Vec<_>>(),
    })
}
