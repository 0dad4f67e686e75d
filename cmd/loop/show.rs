//! The state of a loop for people.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::pipeline::{
    Account, Accountant, ChildStatus, Identity, PolicyStatus, Queue, Run, Status, absent,
};

use crate::common::{Context, Printing};
use crate::report::{Exit, Failure};
use crate::stores;
use crate::visible::visible;

/// How long whoever asks waits for a store of which a loop knows something already.
pub(super) const STORE_PATIENCE: Duration = Duration::from_secs(10);

/// Ask a terminal not to go on on the next line at its margin, and to do so again.
const NO_WRAP: &str = "\x1b[?7l";
const WRAP: &str = "\x1b[?7h";

/// The state, drawn again and again at the end of a terminal.
pub(super) struct Screen {
    there: bool,
    /// Lines drawn last.
    lines: usize,
}

impl Screen {
    /// Draws on a terminal that nobody else writes to.
    pub(super) fn new(context: &Context) -> Self {
        let there = std::io::stderr().is_terminal() && !context.quiet && context.verbose == 0;
        Self { there, lines: 0 }
    }

    /// Whether anything is drawn.
    pub(super) fn is_there(&self) -> bool {
        self.there
    }

    /// Takes the drawing away, so that lines can be said.
    pub(super) fn clear(&mut self) {
        if self.lines > 0 {
            // A closed terminal is no reason to end.
            let _ = write!(std::io::stderr(), "\x1b[{}A\x1b[J", self.lines);
            self.lines = 0;
        }
    }

    /// Draws the state.
    pub(super) fn show(&mut self, status: &Status) {
        if self.there {
            self.clear();
            let text = words(status);
            self.lines = text.lines().count();
            // A line that is too long is cut at the margin: on two it would be counted
            // as one, and half the drawing would stay.
            let _ = writeln!(std::io::stderr(), "{NO_WRAP}{text}{WRAP}");
        }
    }
}

/// Prepares to count the turns of a run.
pub(super) fn accountant(run: &Run, without: &[String]) -> anyhow::Result<Accountant> {
    let accountant = Accountant::new(run, without);
    let Some(url) = &run.store else { return Ok(accountant) };
    Ok(match stores::open(Path::new(url))? {
        Some(store) => accountant.over(store),
        None => accountant,
    })
}

/// Says how the loop of a run is: to people as tables, to others as JSON.
pub(super) fn status(folder: &Path, context: &Context) -> anyhow::Result<Exit> {
    let run = Run::new(folder);
    if !run.turns().is_dir() {
        let problem = format!("`{}` is no run: it has no `turns`", folder.display());
        return Err(Failure::usage(problem).into());
    }
    let kept = Status::kept(&run).unwrap_or_else(|| Status {
        run: folder.display().to_string(),
        without: absent(&run),
        ..Status::default()
    });
    let mut kept = kept;
    let lives = kept.supervisor.as_ref().is_some_and(Identity::lives);
    if !lives {
        kept.children.iter_mut().for_each(leave);
    }
    let run = run.with_store(kept.store.clone());
    let told = Told::of(&run, &kept, context)?;
    let served = if lives { kept.policy.served } else { Default::default() };
    let open = kept.account.filter(|_| lives).map(|it| (it.open, it.open_unknown));
    let (open, open_unknown) = open.unwrap_or_default();
    let status = Status {
        supervisor: kept.supervisor.filter(|_| lives),
        began: kept.began.filter(|_| lives),
        policy: match told.account {
            Some(_) => PolicyStatus::of(&run, told.published, served),
            None => PolicyStatus::untold(&run, served),
        },
        account: told.account.map(|account| Account { open, open_unknown, ..account }),
        stages: told.stages,
        told_at: told.told_at,
        untold: told.untold,
        ..kept
    };
    let text = match std::io::stdout().is_terminal() {
        true => words(&status),
        false => serde_json::to_string_pretty(&status)?,
    };
    writeln!(std::io::stdout(), "{text}").printed()?;
    Ok(Exit::Done)
}

/// What is known of turns and policies.
struct Told {
    account: Option<Account>,
    stages: Vec<Queue>,
    published: Option<u64>,
    told_at: Option<u64>,
    untold: Option<String>,
}

impl Told {
    /// Counts the turns of a run. Where its store does not tell, what the loop saw last
    /// will do.
    fn of(run: &Run, kept: &Status, context: &Context) -> anyhow::Result<Self> {
        let looked = accountant(run, &kept.without).and_then(|accountant| {
            context.block_on(look(&accountant, kept.account.is_some()))?;
            // A loop that has ended does nothing any more.
            let lives = kept.supervisor.as_ref().is_some_and(Identity::lives);
            let began = kept.began.filter(|_| lives).map(Duration::from_secs);
            Ok(accountant.since(began.and_then(|it| SystemTime::UNIX_EPOCH.checked_add(it))))
        });
        match looked {
            Ok(mut accountant) => {
                let (account, stages) = accountant.take()?;
                let (published, told_at) = (accountant.published(), accountant.told_at());
                Ok(Self { account: Some(account), stages, published, told_at, untold: None })
            }
            // It is away, or slow, or whoever asks has no key to it.
            Err(error) => {
                let told = crate::report::told(&error);
                context.say(format!("{told}: turns and policies as the loop saw them last"));
                Ok(Self {
                    account: kept.account.clone(),
                    stages: kept.stages.clone(),
                    published: kept.policy.published,
                    told_at: kept.told_at,
                    untold: kept.untold.clone().or(Some(told)).filter(|_| kept.account.is_none()),
                })
            }
        }
    }
}

/// Looks at the store, if there is one: as long as that takes, or, where a loop has `seen`
/// it, as long as people wait.
async fn look(accountant: &Accountant, seen: bool) -> anyhow::Result<()> {
    if !seen {
        return Ok(accountant.look().await?);
    }
    match tokio::time::timeout(STORE_PATIENCE, accountant.look()).await {
        Ok(looked) => Ok(looked?),
        Err(_) => {
            let seconds = STORE_PATIENCE.as_secs();
            let problem = format!("the object store has not told everything within {seconds} s");
            Err(Failure::engine(problem).into())
        }
    }
}

/// Tells what is known of a process whose supervisor was killed.
fn leave(child: &mut ChildStatus) {
    // Nobody has looked since.
    child.trouble = None;
    if let Some(pid) = child.pid {
        let runs = Identity::of(pid).is_some();
        child.phase = if runs { "left running" } else { "ended" }.to_owned();
        child.pid = child.pid.filter(|_| runs);
    }
}

/// Says it in tables.
fn words(status: &Status) -> String {
    let parts = [processes(status), queues(status), policies(status), turns(status)];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
}

/// Says what has become of the turns, and how old that is.
pub(super) fn turns(status: &Status) -> String {
    let Some(account) = &status.account else {
        let why = status.untold.as_deref().unwrap_or("nobody has counted them");
        return format!("turns: not known yet: {}", visible(why));
    };
    let Some(told) = status.told_at else { return account.words() };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let age = time(now.as_secs().saturating_sub(told));
    format!("{}; as the store told it {age} ago", account.words())
}

fn processes(status: &Status) -> String {
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_header(["process", "state", "for", "restarts", "in a row", "last end"]);
    for child in &status.children {
        // What is wrong now comes before what was.
        let told = child.trouble.as_deref().or(child.last_end.as_deref());
        table.add_row([
            visible(&child.name),
            child.phase.clone(),
            time(child.seconds),
            child.restarts.to_string(),
            child.failures.to_string(),
            visible(told.unwrap_or_default()),
        ]);
    }
    table.to_string()
}

fn queues(status: &Status) -> String {
    let mut table = Table::new();
    let header = ["stage", "shards wait", "rows wait", "oldest", "rows/min", "given up"];
    table.load_style(NOTHING).set_header(header);
    for queue in &status.stages {
        table.add_row([
            queue.stage.clone(),
            queue.shards.to_string(),
            queue.rows.to_string(),
            queue.oldest.map(time).unwrap_or_default(),
            format!("{:.1}", queue.rows_per_minute),
            queue.failed.to_string(),
        ]);
    }
    table.to_string()
}

fn policies(status: &Status) -> String {
    let policy = &status.policy;
    let step = |step: Option<u64>| step.map_or("none".to_owned(), |step| step.to_string());
    let published = match &status.account {
        Some(_) => step(policy.published),
        None => "unknown".to_owned(),
    };
    let mut text = format!("policy: published {published}");
    for (url, version) in &policy.served {
        let version = version.as_deref().map_or("unknown".to_owned(), visible);
        text.push_str(&format!(", {} serves {version}", visible(url)));
    }
    if let Some(behind) = policy.staleness {
        text.push_str(&format!(", {behind} behind"));
    }
    if let Some(step) = policy.last_step {
        let health =
            policy.health.iter().map(|(question, verdict)| format!("{question} {verdict}"));
        text.push_str(&format!(
            "\nhealth of step {step}: {}",
            health.collect::<Vec<_>>().join(", ")
        ));
    }
    text
}

fn time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}
