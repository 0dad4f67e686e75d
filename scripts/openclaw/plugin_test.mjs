// Checks the plugin against a stand-in for OpenClaw's plugin interface.
//
//   node plugin_test.mjs

import assert from "node:assert/strict";
import plugin from "./plugin/index.js";

let hook;
let provider;
plugin.register({
  on: (name, call) => {
    assert.equal(name, "before_prompt_build");
    hook = call;
  },
  registerProvider: (given) => {
    provider = given;
  },
});
assert.equal(provider.id, "oclaw");
const sent = (options) => provider.wrapStreamFn({ streamFn: (_m, _c, given) => given })({}, {}, options);

for (const [trigger, kind] of [
  ["user", "main"],
  ["heartbeat", "side"],
  ["memory", "side"],
  ["cron", "side"],
  ["something new", "main"],
  [undefined, "main"],
]) {
  hook({}, { sessionId: "one", trigger });
  const headers = sent({ sessionId: "one", headers: { "X-Other": "v" } }).headers;
  assert.deepEqual(headers, { "X-Other": "v", "X-Session-Id": "one", "X-Turn-Type": kind }, trigger);
  // Another session's trigger is not this one's.
  assert.equal(sent({ sessionId: "two" }).headers["X-Turn-Type"], "main");
}
hook({}, { sessionId: "one", trigger: "heartbeat" });
for (let other = 0; other < 1000; other += 1) hook({}, { sessionId: `other-${other}` });
assert.equal(sent({ sessionId: "one" }).headers["X-Turn-Type"], "main", "it remembers without end");
assert.deepEqual(sent({}), {});
assert.equal(sent(undefined), undefined);
assert.equal(provider.wrapStreamFn({ streamFn: undefined }), undefined);
console.log("the plugin marks main and side turns");
