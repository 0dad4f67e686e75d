//! A person in conversation.

use serde_json::{Value, json};

use crate::engine::{ChatReply, ChatRequest, Engine};
use crate::template::{enhanced_messages, strip};

use super::shuffle::mix;
use super::{Error, Persona, Reply, Visit};

/// Longest that an engine speaks for a person, in tokens.
const WORDS: u32 = 80;

/// How the agent is asked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asking {
    /// Sampling temperature.
    pub temperature: f64,
    /// Seed of everything random.
    pub seed: u64,
}

/// Somebody who talks to an agent.
#[derive(Debug, Clone)]
pub struct Person<'a> {
    /// Who they are.
    pub persona: &'a Persona,
    /// The agent.
    pub agent: &'a Engine,
    /// Who gives them words; none are the persona's own.
    pub voice: Option<&'a Engine>,
    /// How they ask.
    pub asking: Asking,
}

/// One question asked to measure, with nothing said of the answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    /// Whether the prompt held the person's words as a hint.
    pub hinted: bool,
    /// Whether the reply obeyed.
    pub obeyed: bool,
    /// The reply.
    pub reply: Reply,
    /// Version of the weights, if told.
    pub policy: Option<String>,
}

impl Person<'_> {
    /// Holds a session: a question, then praise, with which it ends, or a complaint,
    /// after the last of which it ends, too.
    pub async fn visit(&self, session: usize, id: &str, question: &str) -> Result<Visit, Error> {
        let mut said = vec![json!({"role": "user", "content": question})];
        let mut visit: Option<Visit> = None;
        for turn in 1..=self.persona.turns {
            let answer = self.ask(&said, (session, turn), id, false).await?;
            let policy = answer.weight_version.clone();
            let reply = read(answer);
            let obeyed = self.persona.rule.holds(&reply)?;
            said.push(json!({"role": "assistant", "content": reply.text}));
            let words = self.words(&said, obeyed, (session, turn)).await?;
            said.push(json!({"role": "user", "content": words}));
            let so_far = visit.get_or_insert_with(|| Visit {
                session,
                id: id.to_owned(),
                question: question.to_owned(),
                policy,
                obeyed,
                content: obeyed,
                replies: 0,
                tokens: reply.tokens,
                all_tokens: Some(0),
                reply: reply.text.clone(),
            });
            so_far.content = obeyed;
            so_far.replies = turn;
            so_far.all_tokens =
                so_far.all_tokens.zip(reply.tokens).map(|(all, tokens)| all + tokens);
            if obeyed {
                break;
            }
        }
        // The last words reach the agent, too; nobody waits for what it says to them.
        self.ask(&said, (session, self.persona.turns + 1), id, true).await?;
        visit.ok_or_else(|| Error::Persona {
            place: format!("persona `{}`", self.persona.name),
            message: "nobody waits for an answer: `turns` is 0".to_owned(),
        })
    }

    /// Asks one question, bare or with the person's words as a hint, as the teacher is
    /// shown it.
    pub async fn probe(&self, place: usize, question: &str, hinted: bool) -> Result<Probe, Error> {
        let mut messages = vec![json!({"role": "user", "content": question})];
        if hinted {
            let words = self.persona.words(false, &[self.asking.seed, place as u64, 0]);
            messages = enhanced_messages(&messages, words)?;
        }
        let request = ChatRequest { headers: vec![side()], ..self.request(&messages, (place, 0)) };
        let answer = self.agent.chat(&request).await?;
        let policy = answer.weight_version.clone();
        let reply = read(answer);
        Ok(Probe { hinted, obeyed: self.persona.rule.holds(&reply)?, reply, policy })
    }

    /// Returns the version of the agent's weights, if it tells. What is asked for it is
    /// not recorded.
    pub async fn policy(&self) -> Result<Option<String>, Error> {
        let said = [json!({"role": "user", "content": "Hello."})];
        let request = ChatRequest {
            max_tokens: Some(1),
            headers: vec![side()],
            ..self.request(&said, (0, 0))
        };
        Ok(self.agent.chat(&request).await?.weight_version)
    }

    async fn ask(
        &self,
        said: &[Value],
        place: (usize, u32),
        id: &str,
        done: bool,
    ) -> Result<ChatReply, Error> {
        let mut request = self.request(said, place);
        request.headers.push(("X-Session-Id", id.to_owned()));
        if done {
            request.headers.push(("X-Session-Done", "1".to_owned()));
            request.max_tokens = Some(1);
        }
        Ok(self.agent.chat(&request).await?)
    }

    fn request(&self, messages: &[Value], place: (usize, u32)) -> ChatRequest {
        ChatRequest {
            messages: messages.to_vec(),
            temperature: Some(self.asking.temperature),
            max_tokens: Some(self.persona.max_tokens),
            seed: Some(self.seed(place)),
            ..ChatRequest::default()
        }
    }

    /// Servers take seeds of 31 bits at least.
    fn seed(&self, (session, turn): (usize, u32)) -> u64 {
        mix(&[self.asking.seed, session as u64, u64::from(turn)]) >> 33
    }

    async fn words(
        &self,
        said: &[Value],
        obeyed: bool,
        place: (usize, u32),
    ) -> Result<String, Error> {
        let (session, turn) = place;
        let Some(voice) = self.voice else {
            let parts = [self.asking.seed, session as u64, u64::from(turn)];
            return Ok(self.persona.words(obeyed, &parts).to_owned());
        };
        let request = ChatRequest {
            messages: self.script(said, obeyed),
            max_tokens: Some(WORDS),
            ..self.request(&[], place)
        };
        let words = strip(&voice.chat(&request).await?.content).to_owned();
        match words.is_empty() {
            true => Err(Error::Wordless { url: voice.url() }),
            false => Ok(words),
        }
    }

    /// What the engine that speaks for the person is told.
    fn script(&self, said: &[Value], obeyed: bool) -> Vec<Value> {
        let text = |place: usize| said.get(place).and_then(|message| message["content"].as_str());
        let question = text(0).unwrap_or_default();
        let answer = text(said.len().saturating_sub(1)).unwrap_or_default();
        let verdict = match obeyed {
            true => "The answer is as they want it: they are pleased and say so.",
            false => {
                "The answer is not as they want it: they say that it is wrong and what they want."
            }
        };
        let examples = self.persona.phrasings(obeyed).join("\n- ");
        let told = format!(
            "A person talks to an assistant. What they want of every answer: {}\n\n\
             They asked:\n{question}\n\nThe assistant answered:\n{answer}\n\n{verdict}\n\n\
             Write what the person says now, in one or two sentences, in words of their own, and \
             nothing else. They talk like this:\n- {examples}",
            self.persona.wish
        );
        vec![json!({"role": "user", "content": told})]
    }
}

/// Marks what is not recorded.
fn side() -> (&'static str, String) {
    ("X-Turn-Type", "side".to_owned())
}

fn read(answer: ChatReply) -> Reply {
    Reply {
        text: answer.content,
        tokens: answer.completion_tokens,
        finish_reason: answer.finish_reason,
    }
}
