"""Composite operators: each one a decomposition into JAX's primitives, with its own VJP where the
plain derivative is numerically poor.

The folder lies at the top of the checkout and imports as `dtorchjax.primitives`.
"""

# Under another name every operator would be registered twice.
if __name__ != "dtorchjax.primitives":
    raise ImportError(
        f"this folder is the package `dtorchjax.primitives`, but was imported as {__name__!r}: "
        "use `import dtorchjax.primitives`"
    )
