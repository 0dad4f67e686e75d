//! A conversation that stands whole in its line: one row per answer.

use serde_json::Value;

use super::import::{Importer, Row, own_branch};
use super::line::{Conversation, Identity};
use super::messages::next_state;
use crate::trajectory::words::SessionSource;

impl Importer {
    /// Adds the turns of a conversation. What an earlier line told already is
    /// counted and told no second time.
    pub(super) fn conversation(&mut self, conversation: &Conversation) {
        let tools = conversation.tools.as_ref().map(|tools| Value::from(tools.clone()).to_string());
        let mut identity = Identity::new("conversation");
        if let Some(tools) = &tools {
            identity = identity.with(tools);
        }
        let (session_id, session_source) = match &conversation.session {
            Some(session) => (session.clone(), SessionSource::Body),
            None => {
                let whole = Value::from(conversation.messages.clone()).to_string();
                (format!("import-{}", identity.clone().with(&whole).hex()), SessionSource::None)
            }
        };
        identity = identity.with(&session_id);
        let mut parent: Option<usize> = None;
        for (index, message) in conversation.messages.iter().enumerate() {
            identity = identity.with(&message.to_string());
            if message["role"] != "assistant" {
                continue;
            }
            if index == 0 {
                // A greeting answers nothing: it is history, not a turn.
                self.counts.greetings += 1;
                continue;
            }
            let turn_id = identity.uuid(conversation.at);
            let next = next_state(conversation.messages[index + 1..].iter());
            if let Some(known) = self.by_id.get(&turn_id).copied() {
                self.counts.repeated += 1;
                self.rows[known].follow(next);
                self.put_under(parent);
                parent = Some(known);
                continue;
            }
            let branch = match parent {
                None => self.branch(&session_id, &turn_id),
                // A conversation that leaves the line of an earlier one: as live.
                Some(parent) if self.parents.contains(&parent) => own_branch(&turn_id),
                Some(parent) => self.rows[parent].turn.branch.clone(),
            };
            let mut row = Row::of(&conversation.messages[..index], message, tools.clone());
            let above = parent.map(|parent| &self.rows[parent].turn);
            row.turn.turn = above.map_or(1, |above| above.turn + 1);
            row.turn.parent_turn_id = above.map(|above| above.turn_id.clone());
            row.turn.session_id.clone_from(&session_id);
            row.turn.session_source = session_source;
            row.turn.session_confidence = 1.0;
            row.turn.request_id.clone_from(&turn_id);
            row.turn.turn_id = turn_id;
            row.turn.branch = branch;
            row.name_model(conversation.model.as_deref());
            row.date(conversation.at, above.map(|above| above.created_at));
            row.follow(next);
            self.put_under(parent);
            parent = Some(self.add(row));
        }
        if let Some(last) = parent {
            self.rows[last].turn.session_end = !self.parents.contains(&last);
        }
    }

    /// Notes that a turn has another one after it.
    fn put_under(&mut self, parent: Option<usize>) {
        if let Some(parent) = parent {
            self.parents.insert(parent);
            self.rows[parent].turn.session_end = false;
        }
    }
}
