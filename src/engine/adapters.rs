//! Adapters (LoRA) that a server loads beside its model, each under a name of its
//! own: a request chooses one as its `model`.

use std::path::Path;

use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use super::retry::Retries;
use super::weights::did;
use super::{Dialect, Engine, Error, NativeCall};

const RUNTIME: &str = "load adapters unless it was started with `--enable-lora` and \
                       `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`";

/// A name that a server lists, and what is behind it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Listed {
    /// What a request asks for.
    #[serde(rename = "id")]
    pub name: String,
    /// Folder or hub name, if the server tells.
    pub root: Option<String>,
}

impl Engine {
    /// Lists the model and its adapters.
    pub async fn listed(&self) -> Result<Vec<Listed>, Error> {
        let answer = self.api(Method::GET, "/models", None).await?;
        let mut list: Value = answer.json()?;
        let data = list.get_mut("data").map(Value::take);
        data.and_then(|data| serde_json::from_value(data).ok())
            .ok_or_else(|| answer.malformed("no `data` list of models"))
    }

    /// Loads an adapter. One that is there already under this name and from this
    /// folder is good: an earlier try may have arrived.
    pub async fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), Error> {
        let path = self.adapter_route("/load_lora_adapter", "/v1/load_lora_adapter")?;
        let folder = folder.display().to_string();
        let body = json!({"lora_name": name, "lora_path": folder});
        let call = NativeCall {
            method: Method::POST,
            path,
            body: Some(&body),
            timeout: None,
            retries: None,
        };
        let refused = match self.native(call).await {
            Ok(answer) => match did(&answer, self.dialect() == Dialect::Sglang) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
            Err(error) if is_no_route(&error) => {
                let (url, dialect) = (self.url(), self.dialect());
                return Err(Error::Unsupported { url, dialect, what: RUNTIME });
            }
            Err(Error::Status { url, status: 400, body, .. }) => {
                Error::Refused { url, message: body, tokens: None }
            }
            Err(error) => return Err(error),
        };
        let wanted = Listed { name: name.to_owned(), root: Some(folder) };
        match self.listed().await {
            Ok(listed) if listed.contains(&wanted) => Ok(()),
            _ => Err(refused),
        }
    }

    /// Lets go of an adapter. The server ends no request that still uses it.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), Error> {
        let path = self.adapter_route("/unload_lora_adapter", "/v1/unload_lora_adapter")?;
        let body = json!({"lora_name": name});
        let call = NativeCall {
            method: Method::POST,
            path,
            body: Some(&body),
            timeout: None,
            // One that comes too late finds nothing to let go of.
            retries: Some(&Retries::none()),
        };
        did(&self.native(call).await?, false)
    }

    /// Sets the version that answers carry, and nothing else.
    pub async fn name_version(&self, version: &str) -> Result<(), Error> {
        self.needs(Dialect::Sglang, "set the weight version")?;
        let body = json!({"new_version": version, "abort_all_requests": false});
        did(&self.control("/update_weight_version", &body).await?, false)
    }

    fn adapter_route(
        &self,
        sglang: &'static str,
        vllm: &'static str,
    ) -> Result<&'static str, Error> {
        match self.dialect() {
            Dialect::Vllm => Ok(vllm),
            _ => self.needs(Dialect::Sglang, "load adapters").map(|()| sglang),
        }
    }
}

/// A folder that vLLM does not find is 404, too; only a missing route says no more.
fn is_no_route(error: &Error) -> bool {
    matches!(error, Error::Status { status: 404 | 405, body, .. }
        if ["Not Found", "Method Not Allowed", ""].contains(&body.as_str()))
}
