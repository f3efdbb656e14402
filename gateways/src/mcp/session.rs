//! The caller of a tool, its default box, and where its boxes are.

use box_client::BoxClient;
use box_protocol::actions::{BoxCreateResult, IfExists};
use box_protocol::{BoxError, BoxId, GatewayName, SpecDraft};
use box_rpc::Caller;
use box_runtime::BoxRuntime;
use box_service::BoxService;

use super::GATEWAY;
use super::notes::Notes;
use crate::http::context::Context;
use crate::target::{DefaultBox, InProcess, Target};

/// What the tools know of their caller.
#[derive(Debug, Clone)]
pub(super) struct Session {
    target: Target,
    default: DefaultBox,
    /// The HTTP request; absent over standard input.
    web: Option<Context>,
    /// What the call tells the model beside its result.
    notes: Notes,
}

impl Session {
    /// Creates the session of a request to a gateway, whose policy applies.
    pub(super) fn of_request(context: Context, default: DefaultBox, gateway: &GatewayName) -> Self {
        Self {
            target: Target::InProcess(context.in_process(gateway)),
            default,
            web: Some(context),
            notes: Notes::default(),
        }
    }

    /// Creates the session of the process that started this one.
    pub(super) fn of_parent(policy: BoxService, runtime: BoxRuntime, default: DefaultBox) -> Self {
        Self {
            target: Target::InProcess(InProcess {
                policy,
                runtime,
                caller: Caller::Local,
                gateway: GATEWAY,
            }),
            default,
            web: None,
            notes: Notes::default(),
        }
    }

    /// Creates the session of the process that started this one, for boxes of a server.
    pub(super) fn of_client(client: BoxClient, default: DefaultBox) -> Self {
        Self {
            target: Target::Server(client),
            default,
            web: None,
            notes: Notes::default(),
        }
    }

    /// Returns the session of one call, with notes of its own.
    pub(super) fn for_call(&self) -> Self {
        Self {
            notes: Notes::default(),
            ..self.clone()
        }
    }

    pub(super) fn notes(&self) -> &Notes {
        &self.notes
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the HTTP request; `None` over standard input.
    pub(super) fn web(&self) -> Option<&Context> {
        self.web.as_ref()
    }

    /// Returns whether a server can have an address for a port of a box.
    pub(super) fn shares_ports(&self) -> bool {
        self.web.is_some() || matches!(self.target, Target::Server(_))
    }

    /// Returns the id of the default box.
    pub(super) fn default_id(&self) -> &BoxId {
        &self.default.id
    }

    /// Returns the box of a call, and creates the default box if it does not exist.
    pub(super) async fn open(&self, asked: Option<&str>) -> Result<BoxId, BoxError> {
        let id = self.id_of(asked)?;
        if id == self.default.id
            && let Some(created) = self.default.open(&self.target).await?
        {
            self.notes.adjusted(&created.adjusted);
            if let Some(earlier) = &created.earlier {
                self.notes.recreated(earlier);
            }
        }
        Ok(id)
    }

    /// Returns the id of the box that a call names, or that of the default box.
    pub(super) fn id_of(&self, asked: Option<&str>) -> Result<BoxId, BoxError> {
        match asked.filter(|asked| !asked.is_empty()) {
            Some(asked) => Ok(BoxId::new(asked)?),
            None => Ok(self.default.id.clone()),
        }
    }

    /// Creates a box with a spec that the policy allows, and notes what the policy changed.
    pub(super) async fn create(
        &self,
        spec: SpecDraft,
        if_exists: IfExists,
    ) -> Result<BoxCreateResult, BoxError> {
        let created = self.target.create(spec, if_exists).await?;
        self.notes.adjusted(&created.adjusted);
        Ok(created)
    }
}
