"""`doxa studio`: pages in a browser that show how posteriors behave, computed by doxa itself.

    doors       who may come in, and with what headers pages leave
    server      the pages, and one websocket per page
    workers     the processes that compute
    forms       the methods and their settings, for forms
    recipes     what rooms with points have in common: a fit, and pictures of it on its way
    functions   the room in which functions follow points
    classification   the room in which classifiers follow points
    samplers    the room in which samplers are watched, step by step
    targets     the densities of that room, and the grammar of typed ones
    lessons     tours through states of the rooms
    pages/      HTML, style and scripts, without a build step

The server answers on the loopback interface only. It computes nothing: a page asks for a panel, a
process computes it with the public functions of doxa, and the page draws the numbers.
"""
