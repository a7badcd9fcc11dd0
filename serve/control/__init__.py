"""The control plane: tenants, apps, keys, sources and subscriptions in a database that only this process opens.

Everybody else reaches them by REST. Requires the extra ``control``.
"""
