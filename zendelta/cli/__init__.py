"""The command line: one file a verb, which parses, calls and prints. No arithmetic here.

A verb is a function in a file of its name, and one line in `VERBS` of `app.py`:

    REPORT = "zendelta.pipeline.shrink.ShrinkReport"  # what --json prints, for docs/cli.md
    EXAMPLES = ["zendelta shrink model -o small.bd"]


    def shrink(model: Annotated[str, typer.Argument(metavar="MODEL", help="What to shrink.")],
               output: OutputPath, json: Json = False, quiet: Quiet = False) -> None:
        \"\"\"Make a model small.\"\"\"
        from zendelta.pipeline.shrink import shrink as pipeline_shrink  # here, so that --help stays fast

        out = Output(json=json, quiet=quiet)
        with out.progress("shrinking") as bar:
            report = pipeline_shrink(model, output, progress=bar)
        out.result(report, table(["tensor", "bytes"], report.rows))

Errors are raised, never caught here: `run.py` has the one table from exception to message and exit code.
"""
