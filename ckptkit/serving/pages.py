"""The pages of the checks that serve a checkpoint, for ``ckptkit checks ID`` and docs/checks.md.

Ids of ``serve.…`` say that the checkpoint is at fault, or that this engine does not take it; those of ``engine.…`` that
the engine could not be run, which proves nothing about the checkpoint.
"""

from __future__ import annotations

from ..checks import Level, Page, Probe

PROBES: tuple[Probe, ...] = ()  # servers are not probed one check at a time: see commands/serving.py

PAGES = (
    # --- it does not start -----------------------------------------------------------------------------------
    Page(
        "serve.start", Level.SERVE, "error", "The engine ended while it loaded the checkpoint",
        "The engine started and gave up. The message is the exception that began it, not the last line of the log, "
        "which mostly says only that something failed.",
        "ended with status 1: ValueError: Following weights were not initialized from checkpoint: ...",
        "Read the end of the log in --report FILE.html; ckptkit verify without --serve tells what is wrong with the checkpoint.",
    ),
    Page(
        "serve.hang", Level.SERVE, "error", "The engine is not ready in time, and nothing compiles",
        "Kernels that are compiled at first use may take minutes: while a compiler runs in the engine's process group "
        "it is engine.timeout. This one waits without one.",
        "not healthy after 1200 s, and nothing compiles: the log ends with 'Loading weights'",
        "Read the log; a longer --timeout where loading takes that long.",
    ),
    Page(
        "serve.corrupt", Level.SERVE, "error", "The engine cannot read a file of the checkpoint",
        "A shard is cut off, or its header is no header.",
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        "ckptkit verify says which file it is; fetch or write it again.",
    ),
    Page(
        "serve.unsupported", Level.SERVE, "error", "This version of the engine refuses the checkpoint or the algorithm",
        "The engine says so itself: no kernel for the format, an architecture that it does not know, a head whose "
        "tensors it has no place for, a way to speculate that it does not have.",
        "Failed to find a kernel that can implement the WNA16 linear layer",
        "Another version or engine (ckptkit verify --engine NAME==VERSION knows what each refuses), or another format.",
    ),
    Page(
        "serve.missing-tensors", Level.SERVE, "error", "Tensors of the model are not in the checkpoint",
        "What is missing is made up at random or left as memory was. Most engines start all the same and answer 200. "
        "The reference of ckptkit does not run without them, so this is found whatever the engine says.",
        "model.layers.7.mlp.down_proj.weight is not there",
        "Convert again; ckptkit verify names everything that is missing.",
    ),
    Page(
        "serve.unknown-tensors", Level.SERVE, "error", "The engine has no place for tensors of the checkpoint",
        "It names them and goes on without them. A packed head that an engine does not know is dropped this way, and "
        "what it then decodes with is something else.",
        "Parameter lm_head.weight_packed not found in params_dict",
        "A version of the engine that knows the format, or a config that names the layers as the engine does.",
    ),
    Page(
        "serve.head-dropped", Level.SERVE, "error", "The engine dropped the head",
        "The tensors of a packed head were passed over while loading: logits come of memory that nothing was written "
        "to. Health and status 200 say nothing of it.",
        "Parameter lm_head.weight_packed not found in params_dict",
        "SGLang from 0.5.23 on loads packed heads; or keep the head dense.",
    ),
    # --- it does not answer ----------------------------------------------------------------------------------
    Page(
        "serve.crash", Level.SERVE, "error", "The engine died on a request",
        "It loaded the checkpoint and was healthy, and the first forward pass, or one with a draft, ended it.",
        "died on a request: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x512 and 768x256)",
        "Read the end of the log in --report FILE.html. Shapes that do not fit are those of the draft as a rule.",
    ),
    Page(
        "serve.request", Level.SERVE, "error", "A request failed while the engine ran on",
        "Completions of token ids are asked for, greedy and with logprobs; the engine answered with an error, with "
        "something that is no answer, or not in time.",
        "/v1/completions: status 500: ...",
        "Read the end of the log in --report FILE.html.",
    ),
    Page(
        "serve.api", Level.SERVE, "error", "The list of models, chat or streaming does not work",
        "Clients use these. The same chat is asked for whole and streamed, and must be the same; where only the text "
        "differs it is a warning.",
        "/v1/chat/completions: the stream ended before it was done",
        "A chat template is missing, or the engine is broken: read the end of the log in --report FILE.html.",
    ),
    Page(
        "serve.concurrent", Level.SERVE, "error", "Requests at the same time are answered differently",
        "The same prompts are asked one by one and together. Near-ties may go either way in a batch; other tokens may "
        "not.",
        "count: token 3 is 28; alone 216, leading by 4.10 nat",
        "A fault of the engine: caches are mixed up between requests.",
    ),
    # --- what it decodes is wrong ----------------------------------------------------------------------------
    Page(
        "serve.decode", Level.SERVE, "error", "What is decoded is degenerate",
        "Nothing, one token for ever, or bytes that are no text, where the reference says something else.",
        "count: token 0 for ever",
        "Look at the head first: whether it was loaded, and with its scales. ckptkit verify --against SRC compares it.",
    ),
    Page(
        "serve.nan", Level.SERVE, "error", "Logprobs are no numbers",
        "A scale or a weight is NaN or infinite, or float16 overflows.",
        "12 of 126 logprobs are no numbers",
        "ckptkit verify --level data finds NaN in the checkpoint; for float16, serve in bfloat16.",
    ),
    Page(
        "serve.uniform", Level.SERVE, "error", "All logits are equal: there is no head",
        "One token is repeated at a logprob of exactly -ln of the vocabulary's size. The head is all zeros: its tensors "
        "or its scales were never loaded.",
        "count: every token is 0 at -ln 32768: the logits are all equal",
        "Tensors of the head are missing, or named otherwise than the engine wants: ckptkit verify.",
    ),
    Page(
        "serve.logprob", Level.SERVE, "error", "The engine does not compute what is stored",
        "Logprobs of given texts, from the engine and from the checkpoint's own values run in float32, differ by more "
        "than rounding: 0.02 nat on average or 0.08 at most, or twice what bfloat16 costs this model where that is "
        "more. Good servers were measured at 0.007 and 0.024, the mildest broken one at 0.150 and 0.399, with every "
        "greedy token right.",
        "logprobs are 0.150 nat off what is stored, 0.399 at most",
        "The engine reads a format otherwise than it is written, or does not use all tensors: read its log.",
    ),
    Page(
        "serve.tolerance", Level.SERVE, "error", "The conversion cost more than its format does",
        "Logprobs of given texts differ from the source's by more than the format's tolerance, or --tolerance. The "
        "engine may well compute what is stored: then what is stored is wrong.",
        "logprobs are 8.214 nat off the source's; the format may cost 0.600",
        "ckptkit verify --against SRC finds the tensors that are not the source's.",
    ),
    Page(
        "serve.greedy-flip", Level.SERVE, "error", "Another token than the source's, where that one was certain",
        "Greedy completions part where the source's best token led by more than 0.5 nat and more than four times the "
        "99th percentile of the differences of logprobs. Where they are nearer, it is a near-tie and counted apart.",
        "count: token 3 is 28 and not 216, which leads by 4.10 nat in the source",
        "ckptkit verify --against SRC finds the tensors that are not the source's.",
    ),
    Page(
        "serve.tokenizer", Level.SERVE, "error", "The tokenizer or the chat template is not the source's",
        "The same texts and chats become other tokens, or tokens do not become the text again that they came of.",
        "question: 12 tokens, and 15 with the source's tokenizer",
        "Copy the source's tokenizer files and chat template.",
    ),
    # --- speculation and scores ------------------------------------------------------------------------------
    Page(
        "serve.spec-mismatch", Level.SERVE, "error", "Speculation changes what is decoded",
        "Drafts are proposals: what is verified is what the model would have said. The same checkpoint decodes other "
        "tokens without speculation, where its best token led by more than --gap.",
        "count: token 3 is 28; without speculation 216, leading by 4.10 nat",
        "A fault of the engine's verification, or another checkpoint was verified with: read its log.",
    ),
    Page(
        "serve.accept-length", Level.SERVE, "error", "The draft is of no use",
        "Tokens a verification, 1 + accepted / verifications, over all measured requests: less than "
        "--min-accept-length, or fewer than 20 drafted tokens accepted. An MTP head that is not loaded, or was built in "
        "another format, drafts at random, and the engine starts all the same.",
        "0 drafted tokens were accepted in 224 verifications: the draft is of no use",
        "The draft's tensors: ckptkit verify; whether it was made for this target: ckptkit inspect.",
    ),
    Page(
        "serve.score", Level.SERVE, "error", "The evaluation's score is too low, or was not measured",
        "The share of right answers is below --min-score; a request that failed after retries leaves the score "
        "unmeasured, which is no pass.",
        "gsm8k: 0.412 of 200, less than 0.6",
        "Compare with the source's score; ckptkit verify --against SRC finds the tensors that are not the source's.",
    ),
    Page(
        "serve.probe", Level.SERVE, "error", "The program of --probe failed",
        "It is run while the server answers, with CKPTKIT_URL and CKPTKIT_MODEL set, and must end with status 0.",
        "./probe.sh ended with status 1: no tool call in the answer",
        "What the program says is in the message.",
    ),
    Page(
        "serve.stop", Level.SERVE, "warning", "The engine had to be killed",
        "It did not end when it was told to.",
        "SIGTERM did not end it within 15 s",
        "None is needed: nothing of it is left. A deployment would wait for it.",
    ),
    # --- the engine could not be run -------------------------------------------------------------------------
    Page(
        "engine.missing", Level.SERVE, "error", "The engine is not installed",
        "The interpreter has no such package, or a module that it needs is not there.",
        "/usr/bin/python3 has no vllm",
        "Install it in an environment of its own: --engine-python PY, or --engine-cmd CMD.",
    ),
    Page(
        "engine.device", Level.SERVE, "error", "There is no GPU that the engine can use",
        "The driver or the device is not there.",
        "RuntimeError: No CUDA GPUs are available",
        "Run it on a machine with a GPU; --engine transformers runs on a CPU.",
    ),
    Page(
        "engine.memory", Level.SERVE, "error", "The engine ran out of memory",
        "Weights, cache and graphs together do not fit, or another program holds the device.",
        "torch.OutOfMemoryError: CUDA out of memory",
        "Free the device, or give the engine less to reserve with --engine-arg.",
    ),
    Page(
        "engine.port", Level.SERVE, "error", "The port was taken",
        "Another program took the port between its choice and the engine's start.",
        "OSError: [Errno 98] Address already in use",
        "Run it again.",
    ),
    Page(
        "engine.arguments", Level.SERVE, "error", "The engine does not take a word of its command line",
        "One of --engine-arg or of arg='…' that it does not know, or one of ckptkit's own that this version lacks. The "
        "launch command stands below the table.",
        "worker.py: error: unrecognized arguments: --bogus",
        "--engine-arg with words of this version's --help.",
    ),
    Page(
        "engine.timeout", Level.SERVE, "error", "Kernels were still being compiled",
        "The engine was not ready in time, and a compiler still ran in its process group.",
        "not healthy after 1200 s, and cicc still compiles its kernels",
        "A longer --timeout; what is compiled is kept for the next start.",
    ),
    Page(
        "engine.unreachable", Level.SERVE, "error", "Nothing answers at --url",
        "The list of models could not be had.",
        "http://127.0.0.1:30000/v1/models: no answer: [Errno 111] Connection refused",
        "Start the server, or correct the URL: it ends before /v1.",
    ),
    Page(
        "engine.killed", Level.SERVE, "error", "The engine was killed from outside",
        "SIGKILL, and no error in its log: the system was short of memory, or somebody killed it. SGLang kills itself "
        "when it fails, and then its log says why.",
        "killed from outside: its log names no error",
        "Look at the system's log; more memory.",
    ),
    Page(
        "engine.crashed", Level.SERVE, "error", "The engine crashed",
        "A signal such as SIGSEGV ended it before it was ready, and its log names no error. That is the engine's fault "
        "or its build's, whatever the checkpoint.",
        "ended by SIGSEGV; its log names no error",
        "Another build or other flags; llama-server needs --no-repack on some machines.",
    ),
)  # fmt: skip
