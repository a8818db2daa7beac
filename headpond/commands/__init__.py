"""The command `headpond`: a module per subcommand. No other room imports this one."""
