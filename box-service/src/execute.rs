//! Tool interface, and requests that need a policy decision first.

use box_protocol::actions::{
    BoxApply, BoxApplyParams, BoxApplyResult, BoxCreate, BoxCreateParams, BoxCreateResult,
    BoxExecParams, BoxGet, BoxGetParams, BoxUpdate, BoxUpdateParams, CatalogGet, CatalogGetParams,
    IfExists, OnTimeout, SystemHealth,
};
use box_protocol::catalog::{CatalogKind, ItemContent};
use box_protocol::{BoxError, BoxId, BoxInfo, Code, Invalid, ItemRef, SpecDraft, check_mounts};
use box_rpc::{Call, Caller, Empty};
use serde_json::{Map, Value};

use crate::audit::{self, Origin};
use crate::paths;
use crate::policy::{self, Decision, Policy, PolicyInputs};
use crate::service::{BoxService, blocking};
use crate::session_id::Query;
use crate::status::ToolResult;

/// Parameters of the `exec` tool beside its command, named as in a spec.
const TOOL_PARAMETERS: [&str; 3] = ["workdir", "timeout_sec", "env"];

impl BoxService {
    /// Runs the `exec` tool.
    /// It takes `command`, and optionally `workdir`, `timeout_sec` and `env`; it ignores `description`. The query
    /// chooses the box, not the tool.
    pub async fn execute_tool(
        &self,
        parameters: Map<String, Value>,
        query: &Query,
    ) -> Result<ToolResult, BoxError> {
        self.execute(tool_draft(parameters), query).await
    }

    /// Runs a spec as requested, in the box it names or else that of the query.
    pub async fn execute_spec_payload(
        &self,
        payload: Map<String, Value>,
        query: &Query,
    ) -> Result<ToolResult, BoxError> {
        self.execute(
            draft_with_session_id(payload).map_err(BoxError::from),
            query,
        )
        .await
    }

    async fn execute(
        &self,
        draft: Result<SpecDraft, BoxError>,
        query: &Query,
    ) -> Result<ToolResult, BoxError> {
        let origin = Origin::from(query);
        let spec = match draft.and_then(|draft| self.fill_defaults(draft, query)) {
            Ok(spec) => spec,
            Err(error) => return self.record_outcome("box.exec", &origin, Err(error)),
        };
        let params = BoxExecParams {
            // Hosts of this tool rely on it: a timeout ends the box.
            on_timeout: OnTimeout::DropBox,
            ..BoxExecParams::new(spec)
        };
        let result = self.exec(params, &origin, None).await?;
        Ok(result.into())
    }

    /// Creates a box as requested: the one it names, or else that of the query.
    pub async fn create(
        &self,
        draft: SpecDraft,
        if_exists: IfExists,
        query: &Query,
    ) -> Result<BoxCreateResult, BoxError> {
        let spec = self.fill_defaults(draft, query)?;
        let params = BoxCreateParams {
            if_exists,
            ..BoxCreateParams::new(spec)
        };
        self.create_with_policy(params, &Origin::from(query), None)
            .await
    }

    /// Fills in the query's session id if the draft has none.
    fn fill_defaults(&self, mut draft: SpecDraft, query: &Query) -> Result<SpecDraft, BoxError> {
        let rules = self.rules();
        let requested = draft.box_id.as_deref().map(str::trim);
        if requested.is_none_or(str::is_empty) {
            let id = rules.template.session_id(query);
            let missing = || Invalid::new("session_id", "must not be empty");
            draft.box_id = Some(id.ok_or_else(missing)?);
        }
        Ok(draft)
    }

    /// Handles `box.create` under policy.
    pub(crate) async fn create_with_policy(
        &self,
        params: BoxCreateParams,
        origin: &Origin,
        call: Option<Call<BoxCreate>>,
    ) -> Result<BoxCreateResult, BoxError> {
        let outcome = async {
            let rules = self.rules();
            let policy = rules.policy_for(&origin.caller);
            let decision = self.decide(policy, params.spec, origin).await?;
            policy::check_native(&decision.spec)?;
            let client = self.client_for(&origin.caller).await?;
            audit::allowed(
                "box.create",
                origin,
                &decision,
                (&rules, &decision.spec.cmd),
            );
            let params = BoxCreateParams {
                spec: SpecDraft::from(decision.spec).brief(),
                if_exists: params.if_exists,
                template_applied: true,
                keep_failed: params.keep_failed,
            };
            let mut created = match call {
                Some(mut call) => client.forward(&params, &mut call, None).await,
                None => client.call::<BoxCreate>(&params).await,
            }?;
            created.adjusted = decision.adjusted;
            Ok(created)
        };
        self.record_outcome("box.create", origin, outcome.await)
    }

    /// Handles `box.update` under policy, because it may contain mounts.
    pub(crate) async fn update_with_policy(
        &self,
        params: BoxUpdateParams,
        origin: &Origin,
        mut call: Call<BoxUpdate>,
    ) -> Result<BoxInfo, BoxError> {
        let outcome = async {
            let rules = self.rules();
            let policy = rules.policy_for(&origin.caller);
            let params = self.check_update(policy, params).await?;
            let client = self.client_for(&origin.caller).await?;
            client.forward(&params, &mut call, None).await
        };
        self.record_outcome("box.update", origin, outcome.await)
    }

    /// Applies the changes of a workspace if the caller may write to its directory.
    pub(crate) async fn apply_with_policy(
        &self,
        params: BoxApplyParams,
        origin: &Origin,
        mut call: Call<BoxApply>,
    ) -> Result<BoxApplyResult, BoxError> {
        let outcome = async {
            let rules = self.rules();
            let client = self.client_for(&origin.caller).await?;
            let get = BoxGetParams::new(params.box_id.clone());
            let info = client.call::<BoxGet>(&get).await?.info;
            if let Some(path) = &info.host_path {
                let policy = rules.policy_for(&origin.caller);
                let inputs = resolve_paths(policy, vec![path.clone()]).await?;
                policy::decide_apply(policy, path, &inputs)?;
            }
            client.forward(&params, &mut call, None).await
        };
        self.record_outcome("box.apply", origin, outcome.await)
    }

    /// Returns the changes that the policy allows.
    pub(crate) async fn check_update(
        &self,
        policy: &Policy,
        mut params: BoxUpdateParams,
    ) -> Result<BoxUpdateParams, BoxError> {
        if let Some(mounts) = &mut params.extra_mounts {
            check_mounts(mounts)?;
            let paths = policy::mount_paths(mounts.iter()).collect();
            let inputs = resolve_paths(policy, paths).await?;
            policy::decide_mounts(policy, mounts, &inputs)?;
        }
        if params.network_policy.is_some() {
            policy::decide_network(policy)?;
        }
        Ok(params)
    }

    pub(crate) async fn decide(
        &self,
        policy: &Policy,
        mut draft: SpecDraft,
        origin: &Origin,
    ) -> Result<Decision, BoxError> {
        self.apply_template(&mut draft, &origin.caller).await?;
        self.decide_under(policy, draft, &origin.caller).await
    }

    /// Decides about a request without a template, or with one that has been filled in.
    pub(crate) async fn decide_under(
        &self,
        policy: &Policy,
        draft: SpecDraft,
        caller: &Caller,
    ) -> Result<Decision, BoxError> {
        check_mounts(draft.extra_mounts.as_deref().unwrap_or_default())?;
        let mut inputs = resolve_paths(policy, policy::host_paths(policy, &draft)).await?;
        if policy.profile.strict {
            let client = self.client_for(caller).await?;
            inputs.missing = client.call::<SystemHealth>(&Empty {}).await?.missing;
        }
        policy::decide(policy, draft, &inputs)
    }
}

impl BoxService {
    /// Fills the unset fields of a request from its template, below the policy.
    ///
    /// An existing box keeps the fields that it has, also if the template has changed since.
    pub(crate) async fn apply_template(
        &self,
        draft: &mut SpecDraft,
        caller: &Caller,
    ) -> Result<(), BoxError> {
        if draft.template.is_none() && draft.pool.is_none() {
            return Ok(());
        }
        let client = self.client_for(caller).await?;
        if let Ok(box_id) = BoxId::new(draft.box_id.as_deref().unwrap_or_default().trim()) {
            let params = BoxGetParams::new(box_id);
            match client.call::<BoxGet>(&params).await {
                Ok(existing) => {
                    draft.inherit_unset(&existing.info);
                    return Ok(());
                }
                Err(error) if error.code() == Code::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let template = match (&draft.template, &draft.pool) {
            (Some(template), _) => template.clone(),
            (None, Some(pool)) => {
                let get = CatalogGetParams {
                    kind: CatalogKind::Pool,
                    item: pool.clone(),
                };
                match client.call::<CatalogGet>(&get).await?.content {
                    ItemContent::Pool(pool) => ItemRef::new(pool.template)?,
                    _ => return Ok(()),
                }
            }
            (None, None) => return Ok(()),
        };
        let params = CatalogGetParams {
            kind: CatalogKind::Template,
            item: template,
        };
        let item = client.call::<CatalogGet>(&params).await?;
        if let ItemContent::Template(template) = &item.content {
            draft.fill_from(&template.spec);
        }
        // A pool stands for its template.
        draft.template = Some(draft.template.take().unwrap_or(params.item));
        Ok(())
    }
}

async fn resolve_paths(policy: &Policy, paths: Vec<String>) -> Result<PolicyInputs, BoxError> {
    if paths.is_empty() {
        return Ok(PolicyInputs::default());
    }
    if !policy.shared_filesystem {
        return Ok(paths::normalize_remote(paths));
    }
    blocking(move || Ok(paths::resolve(paths))).await
}

impl From<&Query> for Origin {
    fn from(query: &Query) -> Self {
        Self {
            query_id: query.query_id.clone(),
            caller: Caller::Local,
        }
    }
}

/// Parses the spec of a host that names its box `session_id`.
pub fn draft_with_session_id(mut payload: Map<String, Value>) -> Result<SpecDraft, Invalid> {
    if let Some(id) = payload.remove("session_id") {
        payload.insert("box_id".to_owned(), id);
    }
    let draft = serde_json::from_value(Value::Object(payload)).map_err(Invalid::from);
    draft.map_err(|invalid| match invalid.field() {
        "box_id" => Invalid::new("session_id", invalid.rule().to_owned()),
        _ => invalid,
    })
}

fn tool_draft(mut parameters: Map<String, Value>) -> Result<SpecDraft, BoxError> {
    parameters.remove("description");
    let command = match parameters.remove("command") {
        Some(Value::String(command)) if !command.trim().is_empty() => command,
        None | Some(Value::Null | Value::String(_)) => {
            return Err(Invalid::new("command", "must not be empty").into());
        }
        Some(_) => return Err(Invalid::new("command", "must be a string").into()),
    };
    let unknown = |parameter: &&String| !TOOL_PARAMETERS.contains(&parameter.as_str());
    if let Some(name) = parameters.keys().find(unknown) {
        return Err(Invalid::new(name.clone(), "not a parameter of exec").into());
    }
    // Nearly all calls contain only a command.
    let draft = if parameters.is_empty() {
        SpecDraft::default()
    } else {
        draft_with_session_id(parameters)?
    };
    Ok(draft.cmd(command))
}
