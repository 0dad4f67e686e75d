// Tells oclaw which session a request belongs to, and which requests are the
// person's (main) and which are OpenClaw's own (side), by three headers.
//
// It owns the provider id `oclaw`, for only a provider can add headers to a
// model's request.

// What starts a run that no person reads. Whatever else there is, or nothing, is
// main: an unmarked request that nobody answers is never judged, but one that is
// wrongly called side is lost.
const SIDE = new Set(["heartbeat", "memory", "cron"]);

// Sessions whose trigger is remembered, at most: the oldest is forgotten.
const REMEMBERED = 1000;

export const id = "oclaw-sessions";

export function register(api) {
  const triggers = new Map();

  api.on("before_prompt_build", (_event, context) => {
    if (context?.sessionId) {
      triggers.delete(context.sessionId);
      triggers.set(context.sessionId, context.trigger);
      if (triggers.size > REMEMBERED) triggers.delete(triggers.keys().next().value);
    }
    return {};
  });

  api.registerProvider({
    id: "oclaw",
    label: "oclaw",
    auth: [],
    wrapStreamFn: ({ streamFn }) =>
      streamFn &&
      ((model, context, options) => {
        const session = options?.sessionId;
        if (!session) return streamFn(model, context, options);
        const kind = SIDE.has(triggers.get(session)) ? "side" : "main";
        const headers = { ...options.headers, "X-Session-Id": session, "X-Turn-Type": kind };
        return streamFn(model, context, { ...options, headers });
      }),
  });
}

export default { id, register };
