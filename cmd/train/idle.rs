//! Flags that do nothing beside the others: refused, or told of where a file or the
//! names of another program give them as a matter of course.

use oclaw::advantage::Estimator;

use super::{Args, DtypeName, OldName, RoundingName};
use crate::report::Failure;

/// What `topk-kl` has no use for: its policy term is 0, and it chooses ids of its own.
const NOT_OF_TOPK_KL: [&str; 13] = [
    "loss",
    "clip-low",
    "clip-high",
    "dual-clip",
    "opsm-delta",
    "importance",
    "importance-low",
    "importance-high",
    "w-rl",
    "distill-clip",
    "hint-selection",
    "subset",
    "distill-weights",
];

/// Refuses what was given for this run and does nothing in it; says so of the rest.
pub(super) fn tell(
    args: &Args,
    estimator: Estimator,
    say: &mut dyn FnMut(String),
) -> Result<(), Failure> {
    check(args, estimator)?.into_iter().for_each(|note| say(format!("note: {note}")));
    Ok(())
}

/// Returns the notes.
fn check(args: &Args, estimator: Estimator) -> Result<Vec<String>, Failure> {
    let mut notes = Vec::new();
    let mut note = |flag: &str, why: String| {
        if args.given.has(flag) {
            notes.push(format!("`--{flag}` does nothing{why}"));
        }
    };
    let under = || format!(" under `--estimator {estimator}`");
    if estimator == Estimator::TopkKl {
        let typed = NOT_OF_TOPK_KL.iter().find(|flag| args.given.is_typed(flag));
        if let Some(flag) = typed {
            let problem = format!(
                "`--{flag}` does nothing under `--estimator topk-kl`, whose loss is the KL from \
                 the teacher over the first hint's ids"
            );
            return Err(Failure::usage(problem).hint(format!("leave `--{flag}` out")));
        }
        NOT_OF_TOPK_KL.iter().for_each(|flag| note(flag, under()));
    } else if estimator != Estimator::Hybrid {
        ["hint-selection", "subset", "distill-weights"].iter().for_each(|flag| note(flag, under()));
    }
    let weighs = [Estimator::Combine, Estimator::Hybrid, Estimator::TopkKl].contains(&estimator);
    if !weighs {
        ["w-rl", "w-opd"].iter().for_each(|flag| note(flag, under()));
    }
    if args.loss.kl_coef == 0.0 {
        note("kl", ": `--kl-coef` is 0".to_owned());
    }
    if args.loss.importance_is_off() && estimator != Estimator::TopkKl {
        let bounds = ["importance-low", "importance-high"];
        bounds.iter().for_each(|flag| note(flag, " under `--importance off`".to_owned()));
    }
    let updates_once = args.epochs == 1 && args.mini_batches == 1;
    let held = updates_once && args.old_log_probs == OldName::Recompute;
    if held && estimator != Estimator::TopkKl {
        let why = " in the only update of a step, where lo is lc: `--epochs` and \
                   `--mini-batches` make more";
        note("opsm-delta", why.to_owned());
    }
    Ok(notes)
}

/// Weights are rounded only where a policy is written in bf16, and by chance only where
/// all of them are trained.
pub(super) fn check_rounding(args: &Args) -> Result<(), Failure> {
    let Some(rounding) = args.save_rounding else { return Ok(()) };
    if args.dtype == Some(DtypeName::F32) {
        let problem = "`--save-rounding` is for policies in bf16: `--dtype f32` rounds nothing";
        return Err(Failure::usage(problem).hint("leave one of the two out"));
    }
    if rounding == RoundingName::Stochastic && args.compute.trains_adapters() {
        let problem = "`--save-rounding stochastic` is not there with `--lora-rank`: the model \
                       with the adapters added is rounded to the nearest, `adapter/` stays f32";
        return Err(Failure::usage(problem).hint("serve `adapter/`, or write `--dtype f32`"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches as _};

    use super::*;

    /// Parses flags, with values that a configuration file would have made defaults.
    fn parsed(flags: &[&str], file: &[(&'static str, &'static str)]) -> Args {
        let mut command = Args::augment_args(Command::new("train"));
        for (id, value) in file {
            command = command.mut_arg(id, |arg| arg.default_value(*value));
        }
        let words = ["train", "--out", "x"].iter().chain(flags);
        Args::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap()
    }

    fn checked(args: &Args) -> Result<Vec<String>, Failure> {
        check_rounding(args)?;
        check(args, args.estimator.unwrap_or_default().into())
    }

    fn refused(flags: &[&str]) -> String {
        checked(&parsed(flags, &[])).unwrap_err().to_string()
    }

    fn noted(flags: &[&str]) -> Vec<String> {
        checked(&parsed(flags, &[])).unwrap()
    }

    #[test]
    fn topk_kl_refuses_by_name_what_it_does_not_read() {
        for (flag, value) in [
            ("--loss", "gspo"),
            ("--clip-low", "0.2"),
            ("--clip-high", "0.28"),
            ("--dual-clip", "3"),
            ("--opsm-delta", "0"),
            ("--importance", "off"),
            ("--importance-low", "0"),
            ("--importance-high", "2"),
            ("--w-rl", "1"),
            ("--distill-clip", "1"),
            ("--hint-selection", "token"),
            ("--subset", "teacher"),
            ("--distill-weights", "teacher"),
        ] {
            let problem = refused(&["--estimator", "topk-kl", flag, value]);
            let wanted = format!("`{flag}` does nothing under `--estimator topk-kl`");
            assert!(problem.starts_with(&wanted), "{problem}");
        }
        let all = ["--w-opd", "0.5", "--kl-coef", "0.1", "--kl", "k2", "--entropy-coef", "0.1"];
        let none: [String; 0] = [];
        assert_eq!(noted(&[&["--estimator", "topk-kl"][..], &all].concat()), none);
    }

    #[test]
    fn what_a_file_gives_is_noted_unless_it_is_the_default() {
        let file = [("subset", "teacher"), ("loss", "ppo")];
        let notes = checked(&parsed(&["--estimator", "topk-kl"], &file)).unwrap();
        assert_eq!(notes, ["`--subset` does nothing under `--estimator topk-kl`"]);
        let notes = checked(&parsed(&["--estimator", "hybrid"], &file)).unwrap();
        assert!(notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn flags_of_other_terms_are_noted() {
        let flags = ["--w-rl", "2", "--w-opd", "2", "--subset", "overlap"];
        for (estimator, wanted) in [
            ("opd", &["subset", "w-rl", "w-opd"][..]),
            ("grpo", &["subset", "w-rl", "w-opd"]),
            ("combine", &["subset"]),
            ("hybrid", &[]),
        ] {
            let line =
                |flag: &&str| format!("`--{flag}` does nothing under `--estimator {estimator}`");
            let wanted: Vec<_> = wanted.iter().map(line).collect();
            assert_eq!(noted(&[&["--estimator", estimator][..], &flags].concat()), wanted);
        }
        assert_eq!(noted(&["--kl", "k1"]), ["`--kl` does nothing: `--kl-coef` is 0"]);
        assert!(noted(&["--kl", "k1", "--kl-coef", "0.1"]).is_empty());
        let bounds = noted(&["--importance", "off", "--importance-high", "3"]);
        assert_eq!(bounds, ["`--importance-high` does nothing under `--importance off`"]);
        let drift = noted(&["--opsm-delta", "0.1"]);
        let told = "`--opsm-delta` does nothing in the only update of a step";
        assert!(drift[0].starts_with(told), "{drift:?}");
        for more in [["--epochs", "2"], ["--mini-batches", "2"], ["--old-log-probs", "rollout"]] {
            assert!(noted(&[&["--opsm-delta", "0.1"][..], &more].concat()).is_empty());
        }
        assert!(noted(&[]).is_empty());
    }

    #[test]
    fn rounding_is_for_bf16_and_all_weights() {
        let f32s = refused(&["--save-rounding", "nearest", "--dtype", "f32"]);
        assert!(f32s.contains("`--dtype f32` rounds nothing"), "{f32s}");
        let adapters = ["--save-rounding", "stochastic", "--lora-rank", "4"];
        assert!(refused(&adapters).contains("is not there with `--lora-rank`"));
        assert!(noted(&["--save-rounding", "nearest", "--lora-rank", "4"]).is_empty());
        assert!(noted(&["--save-rounding", "stochastic", "--dtype", "bf16"]).is_empty());
    }
}
