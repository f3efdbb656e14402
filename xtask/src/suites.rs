//! The suites of `tests/sdk`, and the packages that each runs with.

/// The tests of one protocol.
pub(crate) struct Suite {
    /// Its folder, and its area of `cargo xtask test`.
    pub(crate) name: &'static str,
    pub(crate) environments: &'static [Environment],
}

/// Packages to run a suite with; `requirements.txt` of its folder lists the others.
pub(crate) struct Environment {
    /// The version that tells it apart.
    pub(crate) version: &'static str,
    pub(crate) packages: &'static str,
    /// Packages of which the tests need only a part, and none of their dependencies.
    pub(crate) without_dependencies: &'static str,
    /// Packages of Node, which the tests find in the folder `NODE_PATH`.
    pub(crate) node_packages: &'static str,
    /// The oldest Python that the packages accept; empty if `python3` of the machine is enough.
    pub(crate) python: &'static str,
    /// The only file of the suite to run; empty for all files that the packages are enough for.
    pub(crate) file: &'static str,
}

impl Environment {
    const fn new(version: &'static str, packages: &'static str) -> Self {
        Self {
            version,
            packages,
            without_dependencies: "",
            node_packages: "",
            python: "",
            file: "",
        }
    }

    const fn without_dependencies(mut self, packages: &'static str) -> Self {
        self.without_dependencies = packages;
        self
    }

    const fn node(mut self, packages: &'static str) -> Self {
        self.node_packages = packages;
        self
    }

    const fn python(mut self, version: &'static str) -> Self {
        self.python = version;
        self
    }

    const fn only(mut self, file: &'static str) -> Self {
        self.file = file;
        self
    }
}

/// All suites; the slowest begins first.
pub(crate) const SUITES: [Suite; 7] = [LANGSMITH, LANGBOT, E2B, OPENSANDBOX, AIO, MCP, CODEX];

/// LangSmith's SDKs: the oldest and newest supported version. The older one has templates, volumes and pools.
const LANGSMITH: Suite = Suite {
    name: "langsmith",
    environments: &[
        Environment::new("0.7.29", "langsmith[sandbox]==0.7.29"),
        Environment::new("0.14.17", "langsmith[sandbox]==0.14.17 deepagents==0.7.32")
            .node("langsmith@0.10.5 ws@8.23.0"),
    ],
};

/// LangBot: the oldest and newest supported version. Of the application, the tests need the service and the connector.
const LANGBOT: Suite = Suite {
    name: "langbot",
    environments: &[
        Environment::new("0.7.16", "langbot-plugin==0.7.16")
            .without_dependencies("langbot==4.11.1"),
        Environment::new("0.7.18", "langbot-plugin==0.7.18")
            .without_dependencies("langbot==4.11.2"),
    ],
};

/// E2B's SDKs: the newest with its code interpreter and the packages of npm, and older ones in use; `inspect_ai` needs
/// a newer Python than they do.
const E2B: Suite = Suite {
    name: "e2b",
    environments: &[
        Environment::new(
            "2.63.0",
            "e2b==2.63.0 e2b-code-interpreter==2.11.5 langchain-e2b==0.0.6 langchain-tests==1.1.9 \
             openai-agents==0.24.0 smolagents==1.26.0 matplotlib==3.11.2 pandas==3.1.1",
        )
        .node("e2b@2.51.0 @e2b/code-interpreter@2.8.0 @computesdk/e2b@1.7.52"),
        Environment::new("2.48.0", "e2b==2.48.0"),
        Environment::new("2.20.0", "e2b==2.20.0"),
        Environment::new("2.10.0", "e2b==2.10.0"),
        Environment::new(
            "inspect-0.6.1",
            "inspect-sandboxes==0.6.1 inspect_ai==0.3.285 e2b==2.63.0",
        )
        .python("3.12")
        .only("test_inspect.py"),
    ],
};

/// OpenSandbox's SDKs and its MCP server.
const OPENSANDBOX: Suite = Suite {
    name: "opensandbox",
    environments: &[Environment::new(
        "1.1.1",
        "opensandbox==1.1.1 opensandbox-code-interpreter==1.1.1 opensandbox-mcp==1.1.1",
    )
    .node("@alibaba-group/opensandbox@0.1.11")],
};

/// AIO Sandbox. Of its dependencies, the tests need only those of its requirements.
const AIO: Suite = Suite {
    name: "aio",
    environments: &[Environment::new("0.0.30", "").without_dependencies("agent-sandbox==0.0.30")],
};

/// The official clients of MCP, before and since the lifecycle of 2026-07-28.
const MCP: Suite = Suite {
    name: "mcp",
    environments: &[
        Environment::new("1.30.0", "mcp==1.30.0")
            .node("@modelcontextprotocol/sdk@1.32.2 jsdom@26.1.0"),
        Environment::new("2.3.0", "mcp==2.3.0")
            .node("@modelcontextprotocol/client@2.4.0 jsdom@26.1.0"),
    ],
};

/// OpenAI Codex, as a client of its exec-server and as that server; 160 MiB for the program of one machine.
const CODEX: Suite = Suite {
    name: "codex",
    environments: &[Environment::new("0.169.0", "").node("@openai/codex@0.169.0")],
};
