"""The peer of `oclaw serve` that one would write in an afternoon: FastAPI + httpx,
passing chats through and recording nothing.

    proxy_fastapi.py ENGINE PORT
"""

import sys

import fastapi
import fastapi.responses
import httpx
import starlette.background
import uvicorn

app = fastapi.FastAPI()
client = httpx.AsyncClient(base_url=sys.argv[1], timeout=600, limits=httpx.Limits(max_connections=2000))


@app.post("/v1/chat/completions")
async def chat(request: fastapi.Request):
    headers = {"content-type": "application/json"}
    asked = client.build_request("POST", "/v1/chat/completions", content=await request.body(), headers=headers)
    answer = await client.send(asked, stream=True)
    return fastapi.responses.StreamingResponse(
        answer.aiter_raw(),
        status_code=answer.status_code,
        media_type=answer.headers.get("content-type"),
        background=starlette.background.BackgroundTask(answer.aclose),
    )


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False)
