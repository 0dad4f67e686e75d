//! Words that must not be kept, replaced in every place they can stand in.

use std::sync::Arc;

use arrow::array::{Array, AsArray, ListArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Int32Type, Schema};
use oclaw::privacy::{Error, Pattern, Redactor, Rows};
use oclaw::template::Chat;
use oclaw::trajectory::lint::Linter;
use oclaw::trajectory::words::{SampleKind, TokenSource};
use oclaw::trajectory::{Turn, turn};
use serde_json::{Value, json};

use crate::forge::{STAGES, captured, finished};
use crate::harness::fixture_models as models;

fn redactor(patterns: &[&str]) -> Redactor {
    let own = patterns.iter().map(|text| Pattern::parse(text).unwrap()).collect();
    Redactor::new(own, false).unwrap()
}

fn text(text: &str) -> String {
    redactor(&[]).text(text).map_or(text.to_owned(), |redacted| redacted.text)
}

fn json_of(value: &Value) -> Value {
    let redacted = redactor(&[]).json(&value.to_string()).unwrap();
    serde_json::from_str(&redacted.text).unwrap()
}

fn redact(turns: Vec<Turn>) -> Vec<Turn> {
    let batch = turn::batch(&STAGES, &turns).unwrap();
    let mut rows = Rows::new(&batch.schema(), redactor(&[])).unwrap();
    let (batch, _) = rows.redact(&batch, turns).unwrap();
    turn::read(&batch).unwrap()
}

fn sound(turns: &[Turn]) {
    let mut linter = Linter::default();
    let mut found: Vec<_> = turns.iter().flat_map(|turn| linter.see("t", 0, turn)).collect();
    found.extend(linter.finish());
    assert_eq!(found, []);
}

#[test]
fn overlapping_finds_go_whole() {
    let key = format!("sk-{}", "aB3dE6gH9jK2mN5pQ8sT");
    assert_eq!(
        text(&format!("Authorization: Bearer {key} ok")),
        "Authorization: Bearer [redacted:api_key] ok"
    );
    assert_eq!(text("a@b.org, c@d.org"), "[redacted:email], [redacted:email]");
    let block = "x\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\ny";
    assert_eq!(text(block), "x\n[redacted:private_key]\ny");
    assert_eq!(text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn"), "[redacted:private_key]");
}

#[test]
fn a_second_run_finds_nothing() {
    let once = text("mail a@b.org, password = x7Kq9ZtR4mLp, card 4111-1111-1111-1111");
    assert_eq!(once, "mail [redacted:email], password = [redacted:secret], card [redacted:card]");
    assert!(redactor(&[]).text(&once).is_none());
}

#[test]
fn json_is_redacted_by_value_at_every_depth() {
    let arguments =
        json!({"to": "bob@example.org", "nested": json!({"cc": "eve@example.org"}).to_string()});
    let message = json!([{
        "role": "assistant",
        "content": null,
        "tool_calls": [{"id": "c1", "function": {"name": "mail", "arguments": arguments.to_string()}}],
        "list": ["+49 151 23456789", 4_111_111_111_111_111_i64, 1_764_423_296_000_123_i64],
        "bob@example.org": 1,
        "api_key": "q8Wz4Tn6Yx2Lk9",
        "password": "hunter2",
        "max_tokens": 4096,
    }]);
    let found = json_of(&message);
    let inner: Value =
        serde_json::from_str(found[0]["tool_calls"][0]["function"]["arguments"].as_str().unwrap())
            .unwrap();
    assert_eq!(inner["to"], "[redacted:email]");
    assert_eq!(inner["nested"], r#"{"cc":"[redacted:email]"}"#);
    assert_eq!(
        found[0]["list"],
        json!(["[redacted:phone]", "[redacted:card]", 1_764_423_296_000_123_i64])
    );
    assert_eq!(found[0]["[redacted:email]"], 1);
    assert_eq!(found[0]["api_key"], "[redacted:secret]");
    assert_eq!(found[0]["password"], "[redacted:secret]");
    assert_eq!((&found[0]["role"], &found[0]["max_tokens"]), (&json!("assistant"), &json!(4096)));
    // An escape is another spelling of the same letter.
    let escaped = r#"["bob\u0040example.org"]"#;
    assert_eq!(redactor(&[]).json(escaped).unwrap().text, r#"["[redacted:email]"]"#);
}

/// JSON that is cut, or quoted in prose, cannot be parsed: its escapes still are
/// only another spelling.
#[test]
fn escapes_hide_nothing() {
    let found = json_of(&json!({
        "arguments": r#"{"to": "jane.doe\u0040example.com", "bo"#,
        "prose": r#"He sent {"mail": "jane\\u0040example.com\n"} then."#,
        "lines": r"first\njane@example.com\nlast",
        "link": "https://x.org/?to=jane.doe%40example.com&b=1",
        "Set-Cookie": "sid=s3cr3t; Path=/",
    }));
    assert_eq!(found["arguments"], r#"{"to": "[redacted:email]", "bo"#);
    assert_eq!(found["prose"], r#"He sent {"mail": "[redacted:email]\n"} then."#);
    assert_eq!(found["lines"], r"first\n[redacted:email]\nlast");
    assert_eq!(found["link"], "https://x.org/?to=[redacted:email]&b=1");
    assert_eq!(found["Set-Cookie"], "[redacted:secret]");
}

#[test]
fn own_patterns_come_first_and_may_have_a_group() {
    let redactor = redactor(&["project=Zebedee", "badge=badge (\\d+)", "who=bob@\\S+"]);
    let found = redactor.text("Zebedee, badge 4711, bob@example.org").unwrap();
    assert_eq!(found.text, "[redacted:project], badge [redacted:badge], [redacted:who]");
    assert_eq!(found.counts.len(), 3);
    for wrong in ["no name", "=x", "a b=x", "x=("] {
        let error = Pattern::parse(wrong).unwrap_err();
        assert!(matches!(error, Error::Pattern { .. }), "{wrong}");
        assert!(!error.to_string().contains("=x"), "{error}");
    }
}

#[test]
fn ids_stay_apart() {
    let mut redactor = redactor(&[]);
    let mut id = |text: &str| redactor.id(text).map(|redacted| redacted.text);
    assert_eq!(id("bob@example.org").as_deref(), Some("[redacted:email#1]"));
    assert_eq!(id("eve@example.org/2").as_deref(), Some("[redacted:email#2]/2"));
    assert_eq!(id("bob@example.org").as_deref(), Some("[redacted:email#1]"));
    assert_eq!(id("4111111111111111"), None);
}

#[test]
fn a_changed_row_loses_its_ids_and_an_unchanged_one_keeps_all() {
    let chat = Chat::load(&models().join("tiny-qwen3")).unwrap();
    let secret = "write to bob.smith@example.org";
    let ids = chat.tokenizer.encode_text(secret).unwrap();
    let length = ids.len();
    let mut telling = finished("a", 1);
    telling.response = json!({"role": "assistant", "content": secret}).to_string();
    telling.response_ids = Some(ids);
    telling.usage_completion_tokens = Some(length as u32);
    telling.rollout_log_probs = Some(vec![Some(-1.0); length]);
    telling.teacher_log_probs = Some(vec![Some(vec![-1.0; length]), None]);
    telling.teacher_topk_ids = None;
    telling.teacher_topk_log_probs = None;
    telling.teacher_at_student = None;
    telling.student_topk_ids = None;
    telling.student_topk_log_probs = None;
    (telling.loss_mask, telling.rl_advantages) = (Some(vec![1; length]), Some(vec![1.0; length]));
    telling.advantages = Some(vec![1.0; length]);
    let clean = finished("b", 1);
    let mut feedback = finished("c", 1);
    feedback.next_state =
        Some(json!([{"role": "user", "content": "mail eve@example.org"}]).to_string());
    feedback.feedback_text = Some("eve@example.org".to_owned());
    feedback.judge_text =
        Some(vec![Some("eve@example.org".to_owned()), None, Some("b".to_owned())]);
    let mut hinted = finished("d", 1);
    hinted.hints =
        Some(vec!["ask eve@ex.org now".to_owned(), "ask bob@example.org now".to_owned()]);
    sound(&[telling.clone(), clean.clone(), feedback.clone(), hinted.clone()]);

    let found = redact(vec![telling, clean.clone(), feedback.clone(), hinted]);
    sound(&found);
    let [told, kept, noted, hinted] = &found[..] else { panic!("four rows") };
    assert_eq!(
        told.response,
        json!({"role": "assistant", "content": "write to [redacted:email]"}).to_string()
    );
    for lost in [told, hinted] {
        assert_eq!(
            (&lost.prompt_ids, &lost.response_ids, &lost.rollout_log_probs),
            (&None, &None, &None)
        );
        assert_eq!(
            (&lost.teacher_log_probs, &lost.loss_mask, &lost.advantages),
            (&None, &None, &None)
        );
        assert_eq!((&lost.teacher_topk_ids, &lost.student_topk_ids), (&None, &None));
        assert_eq!(lost.token_source, TokenSource::None);
        assert_eq!(lost.untrainable_reason.as_deref(), Some("redacted"));
        assert_eq!(lost.sample_kind, Some(SampleKind::None));
        assert_eq!(lost.reward, Some(-1.0));
    }
    assert_eq!(hinted.hints.as_deref(), Some(&["ask [redacted:email] now".to_owned()][..]));
    assert_eq!(*kept, clean);
    assert_eq!(noted.response_ids, feedback.response_ids);
    assert_eq!(noted.advantages, feedback.advantages);
    assert_eq!(noted.feedback_text.as_deref(), Some("[redacted:email]"));
    assert_eq!(noted.judge_text.as_ref().unwrap()[0].as_deref(), Some("[redacted:email]"));
    // No row's ids spell it any more.
    for turn in &found {
        let ids = turn.prompt_ids.iter().chain(&turn.response_ids).flatten().copied();
        let ids: Vec<i32> = ids.collect();
        assert!(!chat.tokenizer.decode(&ids, false).unwrap().contains("bob"));
    }
}

#[test]
fn columns_of_other_programs_are_redacted_or_refused() {
    let turns = vec![captured("a", 1)];
    let batch = turn::batch(&STAGES[..1], &turns).unwrap();
    let with = |field: Field, array: Arc<dyn Array>| {
        let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
        fields.push(Arc::new(field));
        let mut columns = batch.columns().to_vec();
        columns.push(array);
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
    };
    let note: Arc<dyn Array> = Arc::new(StringArray::from(vec!["by bob@example.org"]));
    let noted = with(Field::new("note", DataType::Utf8, true), note);
    let mut rows = Rows::new(&noted.schema(), redactor(&[])).unwrap();
    let (found, spots) = rows.redact(&noted, turns.clone()).unwrap();
    let column = found.column_by_name("note").unwrap();
    assert_eq!(column.as_string::<i32>().value(0), "by [redacted:email]");
    assert_eq!((spots[0].column.as_str(), spots[0].unaligned), ("note", false));

    let numbers = ListArray::from_iter_primitive::<Int32Type, _, _>([Some([Some(1)])]);
    let field = Field::new("numbers", numbers.data_type().clone(), true);
    assert!(Rows::new(&with(field, Arc::new(numbers)).schema(), redactor(&[])).is_ok());

    let inner = Field::new("inner", DataType::Utf8, true);
    let fields = vec![Arc::new(inner)].into();
    let nested = Field::new("nested", DataType::Struct(fields), true);
    let schema = Schema::new(vec![nested]);
    assert!(matches!(Rows::new(&schema, redactor(&[])), Err(Error::Column { .. })));
}
