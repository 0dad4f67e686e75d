//! The moving average of the policies.

use oclaw::model::Lora;

use super::*;

fn averaged(folder: &Path, decay: f64) -> Options {
    Options { average: Some(decay), ..options("tiny-qwen3", folder) }
}

fn adapted(folder: &Path, decay: f64) -> Options {
    let targets = "q_proj,up_proj".parse().unwrap();
    let lora = Some(Lora { rank: 4, alpha: 8.0, targets });
    let compute = Compute { lora, ..Compute::default() };
    Options { compute, ..averaged(folder, decay) }
}

fn step(trainer: &mut Trainer, step: u32) -> PathBuf {
    policy(train(trainer, batch(2 * step + 1..=2 * step + 2)))
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    let read = Tensor::read_safetensors(file).unwrap();
    read.into_iter().map(|(name, tensor)| (name, tensor.to_kind(Kind::Double))).collect()
}

/// After two updates: 0.75 (0.75 start + 0.25 first) + 0.25 second. Weights near 1 are
/// rounded by up to 6e-8 in each.
#[test]
fn it_follows_every_update_from_the_start_model_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(averaged(folder.path(), 0.75)).unwrap();
    let policies = [0, 1].map(|number| step(&mut trainer, number));
    let file = "model.safetensors";
    let [start, first, second, average] = [
        models().join("tiny-qwen3").join(file),
        policies[0].join(file),
        policies[1].join(file),
        policies[1].join("ema").join(file),
    ]
    .map(|file| tensors(&file));
    let mut between = 0;
    for (name, found) in &average {
        let wanted = &start[name] * 0.5625 + &first[name] * 0.1875 + &second[name] * 0.25;
        let off = (found - wanted).abs().max().double_value(&[]);
        assert!(off < 5e-7, "{name} is off by {off}");
        let apart = (found - &second[name]).abs().max().double_value(&[]);
        between += u32::from(apart > 1e-4);
    }
    assert!(average.len() == second.len() && between > 10, "{between} of {}", average.len());
    // Anybody's model, tokenizer and all.
    let teacher = Model::load(&policies[1].join("ema"), &LoadOptions::default()).unwrap();
    assert_eq!(teacher.dtype(), Dtype::F32);
    assert!(policies[1].join("ema/tokenizer.json").exists());
    assert!(!policies[1].join("ema/ema").exists());
}

/// Two updates a step are followed one by one.
#[test]
fn parts_of_a_batch_count_each() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let constant = Rates { learning_rate: 0.0, ..Rates::default() };
    let of = |folder: &Path, rates| Options { parts: 2, rates, ..averaged(folder, 0.5) };
    let open = |folder: &Path, rates| Trainer::open(of(folder, rates)).unwrap();
    let rates = Rates { learning_rate: 1e-3, ..Rates::default() };
    let first = step(&mut open(folders[0].path(), rates), 0);
    // Then nothing moves but the average: a quarter of the way is left.
    let second = step(&mut open(folders[0].path(), constant), 1);
    let file = |policy: &Path, name: &str| tensors(&policy.join(name).join("model.safetensors"));
    let name = "model.norm.weight";
    let [weights, before, after] =
        [&file(&second, "")[name], &file(&first, "ema")[name], &file(&second, "ema")[name]];
    let left: Tensor = (weights - before) * 0.25 - (weights - after);
    // Two roundings of numbers near 1, and a way of hundreds of such.
    assert!((weights - before).abs().max().double_value(&[]) > 1e-4);
    assert!(left.abs().max().double_value(&[]) < 5e-7);
}

/// Four steps are two, a restart, and two more, to the bit.
#[test]
fn a_restart_changes_nothing_of_it() {
    type Open = fn(&Path) -> Options;
    let forms: [(Open, &[&str]); 3] = [
        (|folder| averaged(folder, 0.9), &["ema/model.safetensors"]),
        (
            |folder| Options { dtype: Some(Dtype::Bf16), ..averaged(folder, 0.9) },
            &["ema/model.safetensors", "model.safetensors"],
        ),
        (
            |folder| adapted(folder, 0.9),
            &["ema/model.safetensors", "ema/adapter/adapter_model.safetensors"],
        ),
    ];
    for (open, files) in forms {
        let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut trainer = Trainer::open(open(whole.path())).unwrap();
        (0..4).for_each(|number| drop(step(&mut trainer, number)));
        for half in 0..2 {
            let mut trainer = Trainer::open(open(halves.path())).unwrap();
            assert!(trainer.notes().is_empty(), "{:?}", trainer.notes());
            (2 * half..2 * half + 2).for_each(|number| drop(step(&mut trainer, number)));
        }
        let policies = [whole.path().join("latest"), halves.path().join("latest")];
        for file in files.iter().chain(&["oclaw/optimizer.safetensors", "oclaw/ledger.parquet"]) {
            assert!(bytes(&policies[0], file) == bytes(&policies[1], file), "{file}");
        }
    }
}

/// The model with the averaged matrices added.
#[test]
fn of_adapters_it_is_the_sum() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(adapted(folder.path(), 0.5)).unwrap();
    step(&mut trainer, 0);
    let average = step(&mut trainer, 1).join("ema");
    let parts = tensors(&average.join("adapter/adapter_model.safetensors"));
    let [start, merged] =
        [models().join("tiny-qwen3"), average].map(|it| tensors(&it.join("model.safetensors")));
    let mut moved = 0;
    for (name, weight) in &start {
        let module = name.strip_suffix(".weight").unwrap();
        let part = |part: &str| parts.get(&format!("base_model.model.{module}.{part}.weight"));
        let wanted = match (part("lora_A"), part("lora_B")) {
            (Some(a), Some(b)) => {
                moved += u32::from(b.abs().max().double_value(&[]) > 1e-5);
                weight + b.matmul(a) * 2.0
            }
            _ => weight.shallow_clone(),
        };
        let off = (wanted - &merged[name]).abs().max().double_value(&[]);
        assert!(off < 1e-6, "{name} is off by {off}");
    }
    assert_eq!(moved as usize * 2, parts.len());
}

#[test]
fn one_that_begins_late_or_ends_is_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert!(!step(&mut trainer, 0).join("ema").exists());
    drop(trainer);
    let mut trainer = Trainer::open(averaged(folder.path(), 0.5)).unwrap();
    assert!(trainer.notes()[0].contains("begins at the policy as it is"), "{:?}", trainer.notes());
    step(&mut trainer, 1);
    drop(trainer);
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert!(trainer.notes()[0].contains("without `--ema`"), "{:?}", trainer.notes());
    assert!(!step(&mut trainer, 2).join("ema").exists());
}
