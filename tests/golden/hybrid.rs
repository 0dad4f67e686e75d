//! The hybrid loss of the reference's second version: value, metrics, gradient,
//! chosen candidates, subsets. (How hints become candidates: `golden::hints`.)
//!
//! Deliberate differences, each by a rule:
//! * A mask selects: masked tokens are not among the inputs of a reduction.
//! * Candidates are never padded: a recorded slot past a sample's own count is
//!   compared with the candidate that it repeats.
//! * A turn without a hint (kind `rl`) has one recorded candidate all the same,
//!   the teacher without a hint. The pure functions are run on it here, so that
//!   every number can be compared; `train` gives such a turn no distillation
//!   term (`room::train`).

use oclaw::loss::{
    self, Candidates, Clip, DistillWeights, HintSelection, Reduction, Subset, SubsetIds,
    TopkAdvantages,
};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::loss::{Tensors, close, floats, integers, kl_kind};
use crate::harness::{golden_file, golden_json};

/// One batch, all rows.
struct Batch<'a> {
    tensors: &'a Tensors,
    name: &'a str,
    facts: &'a Value,
    lengths: Vec<i64>,
    candidates: Vec<i64>,
    temperature: f64,
    /// Log-probs of the old policy over the vocabulary.
    old: Tensor,
    /// Rows that are trained, and how many of each sample.
    trained: Tensor,
    trained_lengths: Vec<usize>,
}

impl<'a> Batch<'a> {
    fn read(tensors: &'a Tensors, name: &'a str, facts: &'a Value) -> Self {
        let get = |key: &str| tensors.get(&format!("{name}/{key}"));
        let lengths = integers(&get("response_lengths"));
        let mask = integers(&get("loss_mask"));
        let trained: Vec<i64> =
            (0..mask.len() as i64).filter(|row| mask[*row as usize] == 1).collect();
        let mut start = 0;
        let count = |length: &i64| {
            let end = start + length;
            let inside = trained.iter().filter(|row| (start..end).contains(*row)).count();
            start = end;
            inside
        };
        let trained_lengths = lengths.iter().map(count).collect();
        let temperature = facts["temperature"].as_f64().unwrap();
        Self {
            old: (get("old_logits") / temperature).log_softmax(-1, Kind::Float),
            candidates: integers(&get("n_candidates")),
            trained: Tensor::from_slice(&trained),
            trained_lengths,
            lengths,
            temperature,
            tensors,
            name,
            facts,
        }
    }

    fn get(&self, key: &str) -> Tensor {
        self.tensors.get(&format!("{}/{key}", self.name))
    }

    fn k(&self) -> i64 {
        self.facts["k_vocab"].as_i64().unwrap()
    }

    /// Returns each sample's candidates, from the logits alone.
    fn candidates(&self) -> Vec<Candidates> {
        let teacher = (self.get("teacher_logits") / self.temperature).log_softmax(-1, Kind::Float);
        let (mut row, mut teacher_row) = (0, 0);
        let mut all = Vec::new();
        for (length, count) in self.lengths.iter().zip(&self.candidates) {
            let vocabulary = teacher.size()[1];
            let own = teacher.narrow(0, teacher_row, length * count);
            let own = own.view([*count, *length, vocabulary]);
            let (_, student_ids) = self.old.narrow(0, row, *length).topk(self.k(), -1, true, true);
            let (log_probs, ids) = own.topk(self.k(), -1, true, true);
            let at = student_ids.unsqueeze(0).expand([*count, *length, self.k()], false);
            let at_student = Some(own.gather(-1, &at, false));
            all.push(Candidates { student_ids, ids, log_probs, at_student });
            row += length;
            teacher_row += length * count;
        }
        all
    }

    fn spans(&self, sample: usize) -> Option<Vec<(i64, i64)>> {
        let spans = self.facts["step_token_spans"].as_array()?[sample].as_array()?;
        let end = |span: &Value, at: usize| span[at].as_i64().unwrap();
        Some(spans.iter().map(|span| (end(span, 0), end(span, 1))).collect())
    }

    /// Runs the selection of a case, sample by sample.
    fn subset(&self, selection: HintSelection, which: SubsetIds) -> Subset {
        let one = |(sample, candidates): (usize, Candidates)| {
            let spans = self.spans(sample);
            loss::select_subset(&candidates, selection, which, spans.as_deref()).unwrap()
        };
        let parts: Vec<Subset> = self.candidates().into_iter().enumerate().map(one).collect();
        let join = |pick: fn(&Subset) -> &Tensor| {
            Tensor::cat(&parts.iter().map(pick).collect::<Vec<_>>(), 0)
        };
        Subset {
            ids: join(|part| &part.ids),
            inside: join(|part| &part.inside),
            teacher: join(|part| &part.teacher),
            chosen: join(|part| &part.chosen),
            overlap: join(|part| &part.overlap),
            unusable: join(|part| &part.unusable),
        }
    }
}

/// What the reference reports: sums over samples, not means.
struct Reducer<'a> {
    batch: &'a Batch<'a>,
    weights: Tensor,
    factor: f64,
}

impl<'a> Reducer<'a> {
    fn new(batch: &'a Batch<'a>, per_token: bool) -> Self {
        let lengths = &batch.trained_lengths;
        let (reduction, factor) = match per_token {
            true => (Reduction::Token, normalizer(batch)),
            false => (Reduction::Sample, lengths.len() as f64),
        };
        let weights = Tensor::from_slice(&loss::weights(lengths, reduction));
        Self { batch, weights: weights.to_kind(Kind::Float), factor }
    }

    fn sum(&self, rows: &Tensor) -> Tensor {
        let trained = rows.index_select(0, &self.batch.trained);
        loss::reduce(&trained, &self.weights) * self.factor
    }

    fn number(&self, rows: &Tensor) -> f64 {
        self.sum(&rows.to_kind(Kind::Float)).double_value(&[])
    }
}

fn normalizer(batch: &Batch<'_>) -> f64 {
    batch.trained_lengths.iter().map(|length| *length.max(&1) as f64).sum()
}

fn number(case: &Value, key: &str) -> f64 {
    case[key].as_f64().unwrap_or_else(|| panic!("no number `{key}` in {}", case["name"]))
}

fn selection(case: &Value) -> HintSelection {
    match case["hint_selection"].as_str().unwrap() {
        "shortest" => HintSelection::Shortest,
        "sequence_optimal" => HintSelection::Sequence,
        "token_optimal" => HintSelection::Token,
        other => panic!("unknown selection `{other}`"),
    }
}

fn subset_ids(case: &Value) -> SubsetIds {
    match case["distill_subset_mode"].as_str().unwrap() {
        "student" => SubsetIds::Student,
        "teacher" => SubsetIds::Teacher,
        "overlap" => SubsetIds::Overlap,
        other => panic!("unknown subset `{other}`"),
    }
}

/// What one run of the loss came to.
struct Found {
    metrics: Vec<(&'static str, f64)>,
    faults: Vec<String>,
    total: Tensor,
}

impl Found {
    fn put(&mut self, name: &'static str, value: f64) {
        self.metrics.push((name, value));
    }

    fn fault(&mut self, text: impl Into<String>) {
        self.faults.push(text.into());
    }

    fn distil(&mut self, reducer: &Reducer<'_>, log_probs: &Tensor, case: &Value, clip: &Clip) {
        let batch = reducer.batch;
        let (selection, which) = (selection(case), subset_ids(case));
        let subset = batch.subset(selection, which);
        let old = batch.old.gather(-1, &subset.ids, false);
        let limit = case["adv_diff_clip"].as_f64();
        let worth = loss::topk_advantages(&subset, &old, &old, DistillWeights::Policy, limit);
        let TopkAdvantages { advantages, weights, differences } = &worth;
        let current = log_probs.gather(-1, &subset.ids, false);
        let ratio = loss::log_ratio(&current, &old);
        let terms = loss::topk_surrogate(&ratio, advantages, &subset.inside, clip);
        let size = subset.size();
        let full = size.gt(0.0).to_kind(Kind::Float);
        self.put("opd_pg_clipfrac", reducer.number(&terms.clipped));
        self.put("opd_subset_size", reducer.number(&size));
        let size_of = (weights * differences.abs()).sum_dim_intlist(-1, false, Kind::Float);
        self.put("opd_teacher_student_logp_topk_abs_mean", reducer.number(&size_of));
        if which != SubsetIds::Teacher {
            self.put("sel_k_star_mean", reducer.number(&(&subset.chosen * &full)));
            // Reported as 0 where nothing was compared.
            if selection != HintSelection::Shortest {
                let overlap = reducer.number(&(&subset.overlap * &full));
                self.put("sel_overlap_at_k_star", overlap);
            }
        }
        let wanted: Vec<i64> = case["k_star"].as_array().unwrap().iter().map(integer).collect();
        if integers(&subset.chosen) != wanted {
            self.fault(format!("k* is {:?}, wanted {wanted:?}", integers(&subset.chosen)));
        }
        let wanted: Vec<i64> =
            case["empty_subset_rows"].as_array().unwrap().iter().map(integer).collect();
        let empty = integers(&size.eq(0.0).nonzero());
        if empty != wanted {
            self.fault(format!("empty rows are {empty:?}, wanted {wanted:?}"));
        }
        let tokens = batch.tensors.get(&format!("opd_tokens/{}", name(case)));
        let off = (&terms.loss - &tokens).abs() - (tokens.abs() + 1.0) * 2e-5;
        if off.max().double_value(&[]) > 0.0 {
            self.fault("opd_tokens are off");
        }
        let opd = reducer.sum(&terms.loss);
        self.put("opd_loss", opd.double_value(&[]));
        self.total = &self.total + opd * number(case, "w_opd");
    }

    fn reinforce(&mut self, reducer: &Reducer<'_>, log_probs: &Tensor, case: &Value, clip: &Clip) {
        let batch = reducer.batch;
        let old = chosen(&batch.old, &batch.get("tokens"));
        let ratio = loss::log_ratio(log_probs, &old);
        self.put("ppo_kl_sampled", reducer.number(&-&ratio));
        let surrogate = loss::ppo_clip(&ratio, &batch.get("advantages"), clip);
        let policy = reducer.sum(&surrogate.loss);
        self.put("grpo_pg_loss", policy.double_value(&[]));
        self.put("grpo_pg_clipfrac", reducer.number(&surrogate.clipped));
        self.total = &self.total + policy * number(case, "w_rl");
    }
}

fn integer(value: &Value) -> i64 {
    value.as_i64().unwrap()
}

fn name(case: &Value) -> &str {
    case["name"].as_str().unwrap()
}

fn chosen(log_probs: &Tensor, ids: &Tensor) -> Tensor {
    log_probs.gather(-1, &ids.unsqueeze(-1), false).squeeze_dim(-1)
}

fn check_case(tensors: &Tensors, batches: &Value, case: &Value) -> Vec<String> {
    let batch_name = case["batch"].as_str().unwrap();
    let batch = Batch::read(tensors, batch_name, &batches[batch_name]);
    let per_token = case["calculate_per_token_loss"].as_bool().unwrap();
    let reducer = Reducer::new(&batch, per_token);
    let clip =
        Clip { low: number(case, "eps_clip"), high: number(case, "eps_clip_high"), dual: None };
    let logits = batch.get("cur_logits").copy().set_requires_grad(true);
    let scaled = &logits / number(case, "rollout_temperature");
    let log_probs = scaled.log_softmax(-1, Kind::Float);
    let sampled = chosen(&log_probs, &batch.get("tokens"));
    let mut found =
        Found { metrics: Vec::new(), faults: Vec::new(), total: logits.sum(Kind::Float) * 0.0 };
    found.put("w_rl", number(case, "w_rl"));
    found.put("w_opd", number(case, "w_opd"));
    let gap = (&sampled - batch.get("rollout_log_probs")).abs();
    found.put("train_rollout_logprob_abs_diff", reducer.number(&gap));
    if number(case, "w_rl") != 0.0 {
        found.reinforce(&reducer, &sampled, case, &clip);
    }
    if number(case, "w_opd") != 0.0 {
        found.distil(&reducer, &log_probs, case, &clip);
    }
    if number(case, "entropy_coef") != 0.0 {
        let entropy = reducer.sum(&loss::entropy(&scaled));
        found.put("entropy_loss", entropy.double_value(&[]));
        found.total = &found.total - entropy * number(case, "entropy_coef");
    }
    if number(case, "kl_loss_coef") != 0.0 {
        let kind = kl_kind(case["kl_loss_type"].as_str().unwrap());
        let kl = loss::approximate_kl(kind, &sampled, &batch.get("ref_log_probs"), None);
        let kl = reducer.sum(&kl);
        found.put("kl_loss", kl.double_value(&[]));
        found.total = &found.total + kl * number(case, "kl_loss_coef");
    }
    let total = found.total.shallow_clone();
    let value = total.double_value(&[]);
    found.put("loss", value);
    let (divisor, scale) = match per_token {
        true => (normalizer(&batch), 1.0),
        false => (1.0, batch.lengths.len() as f64),
    };
    if divisor != number(case, "normalizer") {
        found.fault(format!("normalizer is {divisor}"));
    }
    if !close(value / scale, number(case, "scaled_loss"), 2e-5) {
        found.fault(format!("scaled loss is {}", value / scale));
    }
    compare(&mut found, case);
    total.backward();
    let wanted = tensors.get(&format!("grad/{}", name(case)));
    let largest = wanted.abs().max().double_value(&[]);
    let off = (logits.grad() - wanted).abs().max().double_value(&[]);
    if off > 2e-5 * largest {
        found.fault(format!("gradient off by {off:e} (largest {largest:e})"));
    }
    found.faults
}

fn compare(found: &mut Found, case: &Value) {
    let mode_ids = ["hint_selection_mode_id", "distill_subset_mode_id"];
    let expected = case["expect"].as_object().unwrap();
    for (key, wanted) in expected.iter().filter(|(key, _)| !mode_ids.contains(&key.as_str())) {
        let wanted = wanted.as_f64().unwrap();
        match found.metrics.iter().find(|(known, _)| known == key) {
            Some((_, value)) if close(*value, wanted, 2e-5) => {}
            Some((_, value)) => found.faults.push(format!("{key} is {value}, wanted {wanted}")),
            // Reported as 0 where it is no part of the loss.
            None if wanted == 0.0 => {}
            None => found.faults.push(format!("{key} is not computed, wanted {wanted}")),
        }
    }
}

#[test]
fn golden_hybrid_cases() {
    let Some(file) = golden_json("hybrid/cases.json") else { return };
    let Some(tensors) = golden_file("hybrid/tensors.safetensors") else { return };
    let tensors = Tensors::read(&tensors);
    let cases = file["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    let mut faults = Vec::new();
    for case in cases {
        let found = check_case(&tensors, &file["batches"], case);
        faults.extend(found.into_iter().map(|fault| format!("{}: {fault}", name(case))));
    }
    println!("{} hybrid cases", cases.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Our own top-k, overlaps and subsets against the recorded ones.
#[test]
fn golden_hybrid_batches() {
    let Some(file) = golden_json("hybrid/cases.json") else { return };
    let Some(tensors) = golden_file("hybrid/tensors.safetensors") else { return };
    let tensors = Tensors::read(&tensors);
    let batches = file["batches"].as_object().unwrap();
    assert!(!batches.is_empty());
    for (name, facts) in batches {
        let batch = Batch::read(&tensors, name, facts);
        let mut row = 0;
        for (sample, candidates) in batch.candidates().iter().enumerate() {
            let length = batch.lengths[sample];
            let rows = |key: &str| batch.get(key).narrow(0, row, length);
            assert_eq!(candidates.student_ids, rows("student_topk_ids"), "{name} {sample}");
            let overlap = loss::topk_overlap(&candidates.student_ids, &candidates.ids);
            for slot in 0..facts["k_max"].as_i64().unwrap() {
                let own = slot % batch.candidates[sample];
                let recorded = |key: &str| batch.get(key).get(slot).narrow(0, row, length);
                assert_eq!(candidates.ids.get(own), recorded("teacher_topk_ids"), "{name}");
                assert_eq!(overlap.get(own), recorded("overlap"), "{name} {sample}");
                let at_student = candidates.at_student.as_ref().unwrap().get(own);
                let off = (at_student - recorded("teacher_log_probs_at_student_ids")).abs();
                assert!(off.max().double_value(&[]) < 1e-5, "{name} {sample}");
            }
            row += length;
        }
        for (mode, selection) in [
            ("shortest", HintSelection::Shortest),
            ("sequence_optimal", HintSelection::Sequence),
            ("token_optimal", HintSelection::Token),
        ] {
            let subset = batch.subset(selection, SubsetIds::Teacher);
            let recorded = |key: &str| batch.get(&format!("collapsed/{mode}/{key}"));
            assert_eq!(subset.ids, recorded("ids"), "{name} {mode}");
            let off = (&subset.teacher - recorded("teacher_log_probs")).abs();
            assert!(off.max().double_value(&[]) < 1e-5, "{name} {mode}");
            assert!(floats(&subset.inside).iter().all(|inside| *inside == 1.0));
        }
    }
}
