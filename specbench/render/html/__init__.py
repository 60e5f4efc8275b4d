"""A report as one self-contained HTML page: it asks nothing of the network.

    document    the page put together             summary     the answer, flags and table
    sections    the figures in order              figures     what a figure is made of
    speedups, acceptance, step_time, parts, requests, concurrency   the figures
    still       the first figure without a script
    prompts, steps  outputs side by side          provenance  how the run came to be
    published   what others measured              page.*      what the browser gets

Numbers come from `analysis`; here they are chosen, sorted and laid out. Model output is never markup: Jinja
escapes what stands in the page, the script puts texts in as text nodes, and a content security
policy lets no script run but the page's own.
"""

from specbench.render.html.document import page

__all__ = ["page"]
