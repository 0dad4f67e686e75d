//! What is trained and how it is computed: adapters, products in bf16, layers run
//! again on the way back.

use oclaw::model::adapter::{self, SETTINGS};
use oclaw::model::{Adapter, Lora, Targets};
use serde_json::Value;

use super::*;

fn lora(targets: &str) -> Lora {
    Lora { rank: 4, alpha: 8.0, targets: targets.parse().unwrap() }
}

fn adapted(folder: &Path, targets: &str) -> Options {
    let compute = Compute { lora: Some(lora(targets)), ..Compute::default() };
    Options { compute, ..options("tiny-qwen3", folder) }
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    Tensor::read_safetensors(file).unwrap().into_iter().collect()
}

/// The base stays; W + alpha / rank B A is what is served, and what was trained.
#[test]
fn an_adapter_learns_and_its_policy_is_the_sum() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(adapted(folder.path(), "q_proj,down_proj")).unwrap();
    let turns = batch(1..=2);
    let before: Vec<f32> =
        turns.iter().map(|turn| response_log_prob(trainer.model(), turn)).collect();
    let start = models().join("tiny-qwen3");
    let plain = Model::load(&start, &LoadOptions::default()).unwrap();
    // B is 0: the adapter changes nothing yet.
    assert_eq!(before[0], response_log_prob(&plain, &turns[0]));
    train(&mut trainer, turns.clone()).unwrap();
    let policy = policy(train(&mut trainer, batch(3..=4)));
    let after = response_log_prob(trainer.model(), &turns[0]);
    assert!(after > before[0], "the praised answer rises: {after} {}", before[0]);

    let (base, merged) = (start.join("model.safetensors"), policy.join("model.safetensors"));
    let (base, merged) = (tensors(&base), tensors(&merged));
    let parts = tensors(&policy.join("adapter/adapter_model.safetensors"));
    let mut moved = 0;
    for (name, weight) in &base {
        let module = name.strip_suffix(".weight").unwrap();
        let part = |part: &str| parts.get(&format!("base_model.model.{module}.{part}.weight"));
        let weight = weight.to_kind(Kind::Float);
        let wanted = match (part("lora_A"), part("lora_B")) {
            (Some(a), Some(b)) => {
                assert_eq!((a.size()[0], b.size()[1]), (4, 4));
                moved += 1;
                weight + b.matmul(a) * 2.0
            }
            _ => weight,
        };
        let off = (&wanted - merged[name].to_kind(Kind::Float)).abs().max().double_value(&[]);
        assert!(off < 1e-6, "{name} is off by {off}");
        assert!(part("lora_B").is_none_or(|b| b.abs().max().double_value(&[]) > 0.0), "{name}");
    }
    assert_eq!((moved * 2, moved % 2), (parts.len(), 0));
    let served = Model::load(&policy, &LoadOptions::default()).unwrap();
    assert!((response_log_prob(&served, &turns[0]) - after).abs() < 1e-4);

    let settings: Value =
        serde_json::from_slice(&bytes(&policy.join("adapter"), SETTINGS)).unwrap();
    assert_eq!(settings["peft_type"], "LORA");
    assert_eq!((settings["r"].as_i64(), settings["lora_alpha"].as_f64()), (Some(4), Some(8.0)));
    assert_eq!(settings["target_modules"], serde_json::json!(["q_proj", "down_proj"]));
    let named = settings["base_model_name_or_path"].as_str().unwrap();
    assert_eq!(Path::new(named), start.canonicalize().unwrap());
}

/// Four steps are two, a restart, and two more, to the bit.
#[test]
fn adapters_go_on_where_they_were() {
    let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut trainer = Trainer::open(adapted(whole.path(), "all-linear")).unwrap();
    for step in 0..4 {
        train(&mut trainer, batch(2 * step + 1..=2 * step + 2)).unwrap();
    }
    for half in 0..2_u32 {
        let mut trainer = Trainer::open(adapted(halves.path(), "all-linear")).unwrap();
        for step in 2 * half..2 * half + 2 {
            train(&mut trainer, batch(2 * step + 1..=2 * step + 2)).unwrap();
        }
    }
    let policies = [whole.path().join("latest"), halves.path().join("latest")];
    for file in [
        "model.safetensors",
        "adapter/adapter_model.safetensors",
        "oclaw/optimizer.safetensors",
        "oclaw/ledger.parquet",
    ] {
        assert!(bytes(&policies[0], file) == bytes(&policies[1], file), "{file}");
    }
    // Another form of training is no continuation.
    for other in [adapted(halves.path(), "q_proj"), options("tiny-qwen3", halves.path())] {
        let error = Trainer::open(other).unwrap_err();
        assert!(matches!(error, Error::OtherForm { .. }), "{error}");
        assert!(error.to_string().contains("rank 4, alpha 8"), "{error}");
    }
}

#[test]
fn what_an_adapter_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::load(&models().join("tiny-qwen3"), &LoadOptions::default()).unwrap();
    let made = Adapter::new(&model.config, lora("v_proj"), 7, tch::Device::Cpu);
    made.write(Path::new("base"), folder.path()).unwrap();
    let (base, read) = adapter::settings(folder.path()).unwrap();
    assert_eq!((base, read), (PathBuf::from("base"), lora("v_proj")));
    let written = fs::read_to_string(folder.path().join(SETTINGS)).unwrap();
    for (from, to, wanted) in [
        ("\"LORA\"", "\"IA3\"", "peft_type"),
        ("\"none\"", "\"all\"", "bias"),
        ("\"r\": 4", "\"r\": 0", "`r`"),
        ("\"r\": 4", "\"r\": 4, \"use_dora\": true", "use_dora"),
        ("\"v_proj\"", "\"embed_tokens\"", "embed_tokens"),
        ("\"v_proj\"", "\"v_proj\", 7", "`target_modules` names no modules"),
        ("\"fan_in_fan_out\": false", "\"modules_to_save\": [\"lm_head\"]", "modules_to_save"),
    ] {
        let text = written.replace(from, to);
        assert_ne!(text, written, "{from}");
        fs::write(folder.path().join(SETTINGS), text).unwrap();
        let error = adapter::settings(folder.path()).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.contains(SETTINGS), "{wanted}: {error}");
    }
    // More or other tensors than the settings tell of.
    fs::write(folder.path().join(SETTINGS), written.replace("v_proj", "k_proj")).unwrap();
    let error = Adapter::read(folder.path(), &model.config, tch::Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("k_proj.lora_A.weight"), "{error}");
    assert!("q_proj,lm_head".parse::<Targets>().unwrap_err().contains("lm_head"));
}

fn gradients_of(options: &LoadOptions, adapter: bool) -> (f64, Vec<Tensor>) {
    let options = LoadOptions { trainable: !adapter, ..*options };
    let mut model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    if adapter {
        let made = Adapter::new(&model.config, lora("all-linear"), 1, tch::Device::Cpu);
        model = model.with_adapter(made).unwrap();
    }
    let batch: Vec<_> =
        (1..=3).map(|number| prepared(&judged(number, 1.0), [true; 3], 0.0)).collect();
    let terms = Terms { entropy_coefficient: 0.1, ..terms() };
    // Two passes.
    let measures = gradients(&model, &batch, &terms, 12);
    (measures.loss, model.trained().iter().map(|(_, weight)| weight.grad()).collect())
}

#[test]
fn layers_run_again_give_the_same_gradients() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for adapter in [false, true] {
            let kept = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
            let again = LoadOptions { checkpoint_activations: true, ..kept };
            let (kept, again) = (gradients_of(&kept, adapter), gradients_of(&again, adapter));
            assert_eq!(kept.0, again.0);
            assert!(kept.1.iter().any(|gradient| gradient.norm().double_value(&[]) > 0.0));
            let same = kept.1.iter().zip(&again.1).all(|(kept, again)| kept.equal(again));
            assert!(same, "{dtype}, adapter: {adapter}");
        }
    }
}

/// Products in bf16: the model computes what the one rounded to bf16 does, and what
/// is trained stays whole.
#[test]
fn bf16_products_of_whole_weights() {
    let load = |trainable| {
        let dtype = Some(Dtype::Bf16);
        let options = LoadOptions { dtype, trainable, ..LoadOptions::default() };
        Model::load(&models().join("tiny-qwen3"), &options).unwrap()
    };
    let (trained, served) = (load(true), load(false));
    assert!(trained.parameters().iter().all(|(_, weight)| weight.kind() == Kind::Float));
    for turn in batch(1..=3) {
        assert_eq!(response_log_prob(&trained, &turn), response_log_prob(&served, &turn));
    }
    let of = |dtype| gradients_of(&LoadOptions { dtype: Some(dtype), ..Default::default() }, false);
    let flat =
        |all: Vec<Tensor>| Tensor::cat(&all.iter().map(|it| it.view(-1)).collect::<Vec<_>>(), 0);
    let (exact, near) = (flat(of(Dtype::F32).1), flat(of(Dtype::Bf16).1));
    let cosine = (&exact * &near).sum(Kind::Float) / (exact.norm() * near.norm());
    assert!(cosine.double_value(&[]) > 0.99 && !exact.equal(&near), "{cosine}");

    let folder = tempfile::tempdir().unwrap();
    let compute = Compute { dtype: Dtype::Bf16, ..Compute::default() };
    let slow = Rates { learning_rate: 1e-6, ..Rates::default() };
    let options = Options { compute, rates: slow, ..options("tiny-qwen3", folder.path()) };
    let trained = train(&mut Trainer::open(options).unwrap(), batch(1..=2)).unwrap();
    // A step that bf16 would swallow is all there.
    assert!(trained.metrics.weights_changed.unwrap() > 0.5, "{:?}", trained.metrics);
    // And what was scored before it is what it began with, to the bit.
    assert_eq!(trained.metrics.approximate_kl, Some(0.0));
}

/// The base of an adapter is held in bf16, and multiplied as it is served.
#[test]
fn bf16_products_beside_an_adapter() {
    let options = LoadOptions { dtype: Some(Dtype::Bf16), ..LoadOptions::default() };
    let load = || Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let served = load();
    let made = Adapter::new(&served.config, lora("all-linear"), 1, tch::Device::Cpu);
    // B is 0: the adapter changes nothing yet.
    let trained = load().with_adapter(made).unwrap();
    for turn in batch(1..=3) {
        assert_eq!(response_log_prob(&trained, &turn), response_log_prob(&served, &turn));
    }
    let folder = tempfile::tempdir().unwrap();
    let mut options = adapted(folder.path(), "all-linear");
    options.compute.dtype = Dtype::Bf16;
    let mut trainer = Trainer::open(options).unwrap();
    let first = train(&mut trainer, batch(1..=2)).unwrap();
    assert_eq!(first.metrics.approximate_kl, Some(0.0));
    assert!(first.metrics.gradient_norm.unwrap() > 0.0, "{:?}", first.metrics);
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let compute = Compute { device: tch::Device::Cuda(7), ..Compute::default() };
    let options = Options { compute, ..options("tiny-qwen3", folder.path()) };
    let error = Trainer::open(options).unwrap_err().to_string();
    assert!(error.contains("Cuda(7)") && error.contains("not available"), "{error}");
}
