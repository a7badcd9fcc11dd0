"""The control plane: what is declared at run time, over HTTP. Apart from the pushing path, which never waits for it."""
