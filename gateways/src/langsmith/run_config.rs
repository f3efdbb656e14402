//! `run_config`: user, directory and environment of commands.

use std::collections::BTreeMap;

use box_protocol::{BoxInfo, Defaults, DefaultsChange, Env, Invalid, SpecDraft, paths};
use serde::{Deserialize, Serialize};

use super::GUEST;
use super::box_request::{BoxNote, named};

/// The fields, as errors name them.
const USER: &str = "run_config.user";
const WORK_DIR: &str = "run_config.work_dir";
pub(super) const ENV_VARS: &str = "run_config.env_vars";

/// User, directory and environment of commands.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RunConfig {
    /// The user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<String>,
    /// The working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) work_dir: Option<String>,
    /// Environment variables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) env_vars: Option<BTreeMap<String, String>>,
}

impl RunConfig {
    /// Returns the settings of a box, below its `env_vars`.
    pub(super) fn of(info: &BoxInfo) -> Self {
        let defaults = info.defaults.clone().unwrap_or_default();
        let mut env = defaults.env.into_map();
        for (name, value) in BoxNote::of(info).shadowed {
            env.remove(&name);
            env.extend(value.map(|value| (name, value)));
        }
        Self {
            user: info.user.clone().or(defaults.user),
            work_dir: defaults.cwd,
            env_vars: Some(env).filter(|env| !env.is_empty()),
        }
    }

    /// Returns these settings of an existing box with others above them.
    pub(super) fn changed(mut self, mut change: Self) -> Result<Self, Invalid> {
        change.check_user(&self)?;
        let env = change.env()?.into_map();
        if !env.is_empty() {
            self.env_vars.get_or_insert_default().extend(env);
        }
        self.work_dir = change.work_dir()?.or(self.work_dir);
        Ok(self)
    }

    /// Refuses another user than that of an existing box, which has these settings.
    fn check_user(&self, own: &Self) -> Result<(), Invalid> {
        let own = own.user.as_deref().unwrap_or(GUEST);
        if self.user.as_deref().is_some_and(|user| user != own) {
            let rule = format!(
                "must be {own:?}, because the user of an existing box cannot change; omit it"
            );
            return Err(Invalid::new(USER, rule));
        }
        Ok(())
    }

    /// Takes the variables.
    pub(super) fn env(&mut self) -> Result<Env, Invalid> {
        let env = Env::try_from(self.env_vars.take().unwrap_or_default());
        env.map_err(|error| named(ENV_VARS, &error))
    }

    /// Takes the directory.
    fn work_dir(&mut self) -> Result<Option<String>, Invalid> {
        let path = self.work_dir.take();
        if let Some(path) = &path {
            paths::inside(WORK_DIR, path)?;
        }
        Ok(path)
    }

    /// Sets the user and the defaults of a new box; later variables override earlier ones.
    ///
    /// Every box has the guest. The image of a box may have other users, which the runtime knows; without an image, it
    /// refuses them.
    pub(super) fn apply(
        mut self,
        spec: &mut SpecDraft,
        defaults: &mut Defaults,
    ) -> Result<(), Invalid> {
        defaults.env.extend(self.env()?);
        defaults.cwd = self.work_dir()?.or(defaults.cwd.take());
        if let Some(user) = self.user {
            spec.user = (user != GUEST).then_some(user);
        }
        Ok(())
    }

    /// Returns the changes of an existing box, whose user stays.
    pub(super) fn into_change(mut self, info: &BoxInfo) -> Result<DefaultsChange, Invalid> {
        self.check_user(&Self::of(info))?;
        let env = self.env()?.into_map().into_iter();
        Ok(DefaultsChange {
            env: env.map(|(name, value)| (name, Some(value))).collect(),
            cwd: self.work_dir()?.map(Some),
            ..DefaultsChange::default()
        })
    }

    /// Checks the settings of later boxes.
    pub(super) fn check(&self, on_image: bool) -> Result<(), Invalid> {
        let mut spec = SpecDraft::default();
        self.clone().apply(&mut spec, &mut Defaults::default())?;
        if spec.user.is_some() && !on_image {
            return Err(Invalid::new(USER, "requires an image; omit it"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn applied(config: serde_json::Value) -> Result<(SpecDraft, Defaults), Invalid> {
        let (mut spec, mut defaults) = (SpecDraft::default(), Defaults::default());
        let config: RunConfig = from_value(config).unwrap();
        config.apply(&mut spec, &mut defaults)?;
        Ok((spec, defaults))
    }

    #[test]
    fn a_user_beside_the_guest_is_one_of_the_image() {
        for (user, of_image) in [("box", None), ("root", Some("root"))] {
            let (spec, defaults) = applied(json!({"user": user})).unwrap();
            assert_eq!((spec.user.as_deref(), defaults.user), (of_image, None));
        }
    }

    #[test]
    fn errors_name_the_field_of_the_request() {
        for (config, field) in [
            (json!({"work_dir": "relative"}), "run_config.work_dir"),
            (json!({"env_vars": {"A=B": "x"}}), "run_config.env_vars"),
        ] {
            assert_eq!(applied(config).unwrap_err().field(), field);
        }
        let config: RunConfig = from_value(json!({"user": "root"})).unwrap();
        assert_eq!(config.check(true), Ok(()));
        let refused = config.check(false).unwrap_err();
        assert_eq!(refused.field(), "run_config.user");
    }
}
