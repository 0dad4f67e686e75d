//! `oclaw teacher-lp --dry-run`: how much there is to score, counted exactly,
//! for the ids of every request are made here anyway.

use std::cell::{Cell, RefCell};
use std::path::Path;

use oclaw::stage;
use oclaw::teacher_lp::{self, Asked, ScoreRequest, Teacher};
use oclaw::template::Chat;
use oclaw::trajectory::{Turn, Writer};

use super::{Args, check_tokenizer, keeper, vocabulary, whom};
use crate::answers::Answers;
use crate::common::Context;
use crate::forecast::{self, Expected};
use crate::report::Exit;
use crate::spending::Meter;

/// Prints how much there is to score.
pub(super) async fn foretell(
    args: &Args,
    context: &Context,
    (chat, folder): (&Chat, &Path),
) -> anyhow::Result<Exit> {
    let source = args.files.open_to_look(context)?;
    check_tokenizer(&source, chat, folder, &|text| context.say(text))?;
    let mut plan = args.files.plan(context, Writer::TeacherLp, &source)?;
    plan.needs = &["hints"];
    let answers = Answers::peek(&args.keeping, &context.command)?;
    let (of_teacher, of_student) = whom::known(args, &answers).await?;
    let teacher = Teacher {
        chat,
        name: "",
        tempers: whom::all_local(args),
        topk: args.topk(),
        vocabulary: vocabulary(chat, folder),
    };
    let meter = Meter::new(&args.budget);
    let (expected, asked) = (RefCell::<Expected>::default(), Cell::new(0));
    let look = async |turn: Turn| {
        let some = Cell::new(false);
        let share = meter.share(turn.hints.as_ref().map_or(0, Vec::len));
        let score = async |request: ScoreRequest| {
            some.set(true);
            let whom = match request.asked {
                Asked::Teacher => of_teacher.as_ref(),
                Asked::Student(_) => of_student.as_ref(),
            };
            let mut expected = expected.borrow_mut();
            keeper::foretell(&mut expected, (&answers, whom, &share), &request)
        };
        teacher_lp::teach(turn, &teacher, score).await;
        asked.set(asked.get() + u64::from(some.get()));
    };
    let tally = stage::survey(source, &plan, look).await?;
    forecast::print(&tally, asked.get(), &expected.into_inner(), (&args.budget, "counted"))?;
    Ok(Exit::Done)
}
