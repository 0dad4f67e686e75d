//! Answers of inference servers, through a real socket: SGLang's and vLLM's log-probs
//! of given tokens, and chat completions. Scores are exactly as many as were asked for,
//! all of them numbers, or there is an error.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use oclaw::engine::{ChatRequest, Dialect, Engine, EngineOptions, Retries, ScoreRequest};

/// The body that the server answers with.
static BODY: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// The first byte says who answers.
pub(crate) fn run(bytes: &[u8]) {
    let Some((first, body)) = bytes.split_first() else { return };
    *BODY.lock().unwrap_or_else(PoisonError::into_inner) = body.to_vec();
    let dialect = [Dialect::Sglang, Dialect::Vllm][usize::from(*first) % 2];
    let mut options = EngineOptions::new(format!("http://{}", server()));
    options.dialect = Some(dialect);
    options.model = Some("m".to_owned());
    options.timeout = Duration::from_secs(10);
    options.retries = Retries::none();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let engine = Engine::connect(options).await.unwrap();
        let chosen = if first & 2 == 0 { Vec::new() } else { vec![7, 9, 8, 9] };
        let request = ScoreRequest { ids: vec![5, 6, 7, 8], start: 2, top_k: 2, chosen };
        if let Ok(scores) = engine.score(&request).await {
            assert_eq!((scores.log_probs.len(), scores.top_ids.len()), (2, 4));
            assert_eq!(scores.top_log_probs.len(), 4);
            assert_eq!(scores.chosen_log_probs.len(), request.chosen.len());
            let values = [scores.log_probs, scores.top_log_probs, scores.chosen_log_probs];
            assert!(values.concat().iter().all(|value| value.is_finite()));
        }
        if let Err(error) = engine.chat(&ChatRequest::default()).await {
            assert!(!error.to_string().is_empty());
        }
    });
}

/// Returns the address of the one server, which lives as long as the process.
fn server() -> SocketAddr {
    static SERVER: OnceLock<SocketAddr> = OnceLock::new();
    *SERVER.get_or_init(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away is no matter.
                let _ = answer(stream);
            }
        });
        address
    })
}

/// Answers one request and closes, so that the next one comes to this thread again.
fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    let whole = |request: &[u8]| {
        let head = request.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
        let text = String::from_utf8_lossy(&request[..head]).to_ascii_lowercase();
        let length = text.split("content-length: ").nth(1)?.lines().next()?.trim().parse::<usize>();
        (request.len() >= head + length.ok()?).then_some(())
    };
    while whole(&request).is_none() {
        match stream.read(&mut piece)? {
            0 => return Ok(()),
            count => request.extend_from_slice(&piece[..count]),
        }
    }
    let body = BODY.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(&body)
}
