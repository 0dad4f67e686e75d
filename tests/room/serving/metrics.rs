//! What the engine tells a scraper.

use super::*;

async fn scrape(running: &Running) -> String {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let response = client.get(format!("{}/metrics", running.url())).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4");
    response.text().await.unwrap()
}

/// Returns the value of a sample of the served model.
fn value(text: &str, name: &str, further: &str) -> f64 {
    let start = format!("sglang:{name}{{model_name=\"tiny-qwen3\"{further}}} ");
    let found = text.lines().find_map(|line| line.strip_prefix(&start));
    found.unwrap_or_else(|| panic!("{start}: {text}")).parse().unwrap()
}

/// Scrapes until a figure is so: the compute thread tells where it stands after the step
/// whose tokens are out already.
pub(super) async fn until(running: &Running, name: &str, expected: f64) {
    let patience = tokio::time::Instant::now() + crate::harness::PATIENCE;
    while value(&scrape(running).await, name, "") != expected {
        assert!(tokio::time::Instant::now() < patience, "{name} never was {expected}");
    }
}

#[tokio::test]
async fn tokens_and_answers_are_counted_as_usage_counts_them() {
    install_tls();
    let running = tiny().await;
    let fresh = scrape(&running).await;
    for name in ["num_requests_total", "prompt_tokens_total", "generation_tokens_total"] {
        assert_eq!(value(&fresh, name, ""), 0.0);
    }
    let sampling = json!({"max_new_tokens": 12, "ignore_eos": true, "n": 2});
    good(&running, "/generate", json!({"input_ids": [5, 6, 7], "sampling_params": sampling})).await;
    // A score is a prompt, and no answer.
    let body = json!({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 0}});
    good(&running, "/generate", body).await;
    until(&running, "num_running_reqs", 0.0).await;
    let text = scrape(&running).await;
    for (name, expected) in [
        ("num_requests_total", 2.0),
        ("num_aborted_requests_total", 0.0),
        ("prompt_tokens_total", 5.0),
        ("generation_tokens_total", 24.0),
        ("time_to_first_token_seconds_count", 2.0),
        ("inter_token_latency_seconds_count", 22.0),
        ("e2e_request_latency_seconds_count", 2.0),
        ("num_running_reqs", 0.0),
        ("num_queue_reqs", 0.0),
        ("gen_throughput", 0.0),
    ] {
        assert_eq!(value(&text, name, ""), expected, "{name}");
    }
    let whole = value(&text, "e2e_request_latency_seconds_sum", "");
    let parts = ["time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum"];
    let parts: f64 = parts.iter().map(|name| value(&text, name, "")).sum();
    assert!(parts > 0.0 && parts <= whole, "{parts} {whole}");
    let all = value(&text, "time_to_first_token_seconds_bucket", ",le=\"+Inf\"");
    assert_eq!(
        (all, value(&text, "time_to_first_token_seconds_bucket", ",le=\"400.0\"")),
        (2.0, 2.0)
    );
    running.shutdown().await;
}

#[tokio::test]
async fn what_waits_and_what_is_cut_off_is_told() {
    install_tls();
    let running = tiny().await;
    good(&running, "/pause_generation", json!({"mode": "in_place"})).await;
    let sampling = json!({"max_new_tokens": 1000, "ignore_eos": true});
    let body = json!({"input_ids": [5], "sampling_params": sampling, "stream": true});
    let stream = Events::open(&running, "/generate", body).await;
    until(&running, "num_queue_reqs", 1.0).await;
    drop(stream);
    until(&running, "num_aborted_requests_total", 1.0).await;
    good(&running, "/continue_generation", json!({})).await;
    until(&running, "num_queue_reqs", 0.0).await;
    assert_eq!(value(&scrape(&running).await, "e2e_request_latency_seconds_count", ""), 0.0);
    running.shutdown().await;
}
