"""`slipstream serve`: an OpenAI-compatible server."""

from dataclasses import replace

import typer

from slipstream.cli.deploy import plan_of, run_locally
from slipstream.cli.flags import Given, RunFlags, parsed
from slipstream.cli.listen import ServingFlags, announce
from slipstream.cli.open_llm import open_llm, print_defaults
from slipstream.deploy.options import DeploymentPlan, ReplicaOptions


def serve(*, serving: ServingFlags, run: RunFlags, given: Given) -> None:
    """Serve a model over HTTP, in the OpenAI and Messages protocols.

    Requests share one engine, which decodes speculatively if there is a drafter. Without MODEL the
    bundled demo is served. The first Ctrl-C or SIGTERM lets running requests
    finish, the second stops at once.
    """
    if serving.engine.data_parallel_size > 1 and not serving.engine.shares_experts:
        plan = _plan(serving=serving, run=run)
        raise typer.Exit(run_locally(plan, lambda: parsed(_plan, given.line)))
    config, options = serving.checked()
    from slipstream.models.chat_template import ChatTemplate
    from slipstream.serve.listening import bind
    from slipstream.serve.listening import listen as let_connect
    from slipstream.serve.memory import keep_few_matmuls
    from slipstream.serve.page import page_routes
    from slipstream.serve.run import start_server

    sock = bind(options.host, options.port, options.uds)
    keep_few_matmuls()
    try:
        llm, seconds = open_llm(config, run.verbose)

        def tell() -> None:
            let_connect(sock)  # before the address is printed
            template = options.chat_template
            chats = not config.skip_tokenizer_init and ChatTemplate(llm.tokenizer, template).exists
            announce(options, sock, seconds, chats)
            print_defaults(llm.engine.resolved.sampling_defaults)

        code = start_server(llm.engine, config, options, sock, page_routes(), tell)
    finally:
        sock.close()
        if options.uds is not None:
            options.uds.unlink(missing_ok=True)
    raise typer.Exit(code)


def _plan(*, serving: ServingFlags, run: RunFlags) -> DeploymentPlan:
    plan = plan_of(serving, ReplicaOptions(replicas=serving.engine.data_parallel_size))
    return replace(plan, config=replace(plan.config, data_parallel_size=1))
